// A CPU that behaves like one multiprocessor: runs the threads of a block as fibers, one block after the other.
//
// A fiber runs until it has to wait for others. In what order fibers, warps and blocks take turns is drawn from a seed, so
// that a kernel which relies on an order that it does not enforce gives other results, or none, with another seed:
//   seed 0      threads and blocks in order; a warp runs as far as it can before the next one starts
//   other seeds blocks, warps and lanes in a random order; a warp is left after a random number of turns
// Copies to shared memory land as late as the hardware may let them: when somebody waits for them. Until then their
// destination holds NaN patterns, as does all shared memory that was not written.
//
// What a GPU answers with a fault, a hang or undefined behaviour ends the launch with a message: lanes of a warp at
// different collective calls, a thread that returned while others wait for it, waits that never end, addresses outside of
// shared memory, misaligned accesses, wrong byte counts, copies that nobody waited for.
//
// Everything has internal linkage: many compiled kernels live in one process, each with a machine of its own.
#pragma once
#if defined(__APPLE__)
#define _XOPEN_SOURCE 700
#define _DARWIN_C_SOURCE
#endif
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <vector>

struct Index3 {
  u32 x, y, z;
};
static Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
namespace {

constexpr u32 WARP = 32, MAX_THREADS = 1024, MAX_SHARED = 256 * 1024;
constexpr u64 GUARD = 16 << 20;  // bytes on either side of shared memory that nobody may touch
constexpr u32 SHARED_BASE = 1024;  // shared addresses start here: a pointer's low bits are not mistaken for one
constexpr u64 STACK = 256 * 1024;
constexpr u8 POISON = 0xff;  // as fp16, bf16, fp32, e4m3, e5m2 and e8m0: not a number
constexpr u8 CANARY = 0xa5;
constexpr u32 MAX_TRANSACTION = (1u << 20) - 1;

struct Site {
  const char* what;
  const char* file;
  int line;
  bool operator!=(const Site& o) const {
    return line != o.line || (what != o.what && strcmp(what, o.what)) || (file != o.file && strcmp(file, o.file));
  }
};

struct Copy {
  u32 destination, bytes;
  const void* source;
  u64 group;
};

enum State { READY, AT_WARP, AT_BLOCK, AT_BARRIER, RETURNED };

struct Lane {
  State state;
  bool started;
  Site site;             // the call in which it waits, or the last one that it left
  u32 in[10], out[4];    // of a collective call
  u32 barrier, parity;   // where it waits, if AT_BARRIER
  std::vector<Copy> copies;
  u64 committed;         // groups of lane copies
  u32 index;
  jmp_buf where;
  ucontext_t first;
};

struct Warp {
  u32 arrived, returned;
  Lane* first;  // to arrive
};

// An mbarrier for one arrival. The hardware's 8 bytes are opaque; here they only show whether somebody wrote over them.
struct Barrier {
  u32 phase;
  bool arrived, visible;
  i64 transactions;  // bytes expected less bytes copied, in this phase
  u32 initialiser;
  std::vector<Copy> copies;
};

struct Launch {
  Index3 grid;
  u32 threads, shared_bytes;
  u64 seed;
  char* error;
  u64 error_size;
};

struct Machine {
  Launch launch;
  void (*kernel)();
  void (*call)(void (*)(), const void*);
  const void* params;
  Lane lanes[MAX_THREADS];
  Warp warps[MAX_THREADS / WARP];
  u32 block_arrived, block_returned;
  Lane* first_in_block;  // to arrive
  Lane* running;
  jmp_buf scheduler;
  bool failed;
  u64 random_state;
  u32 leader;  // the lane that elect_one picks
  u8 *reserved, *shared, *stacks;
  std::vector<u8> in_flight;  // per 16 bytes of shared memory
  std::map<u32, Barrier> barriers;
};
static Machine M;

u64 random_number() {
  u64 z = (M.random_state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// ---- errors

__attribute__((noinline)) void describe(const char* format, va_list arguments) {
  char message[1024];
  vsnprintf(message, sizeof message, format, arguments);
  if (M.running)
    snprintf(M.launch.error, M.launch.error_size, "block (%u, %u, %u), warp %u, lane %u: %s", blockIdx.x, blockIdx.y, blockIdx.z,
             M.running->index / WARP, M.running->index % WARP, message);
  else
    snprintf(M.launch.error, M.launch.error_size, "block (%u, %u, %u): %s", blockIdx.x, blockIdx.y, blockIdx.z, message);
  M.failed = true;
}

// Ends the launch. Called by a fiber.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  describe(format, arguments);
  va_end(arguments);
  _longjmp(M.scheduler, 1);
}

// Ends the launch. Called between fibers; the caller returns.
__attribute__((format(printf, 1, 2))) void report(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  describe(format, arguments);
  va_end(arguments);
}

const char* last_site() {
  static char text[512];
  const Site& s = M.running->site;
  if (s.what)
    snprintf(text, sizeof text, "; the last call before it: %s at %s:%d", s.what, s.file, s.line);
  else
    text[0] = 0;
  return text;
}

void on_signal(int number, siginfo_t* info, void*) {
  if (!M.running) {  // not the kernel's doing: let it happen again without this handler
    signal(number, SIG_DFL);
    return;
  }
  const u8* address = static_cast<const u8*>(info->si_addr);
  if (number == SIGFPE) fail("integer division by zero%s", last_site());
  if (number == SIGILL || number == SIGTRAP) fail("illegal instruction%s", last_site());
  if (address >= M.reserved && address < M.reserved + 2 * GUARD + MAX_SHARED)
    fail("access to shared memory at byte %lld of %u%s", static_cast<i64>(address - M.shared), M.launch.shared_bytes, last_site());
  fail("invalid memory access at %p%s", static_cast<const void*>(address), last_site());
}

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};

// Turns faults of a fiber into errors while it lives. The handler has a stack of its own: a fiber's may be what is full.
struct Signals {
  static constexpr size_t size = 64 * 1024;
  struct sigaction before[sizeof SIGNALS / sizeof *SIGNALS];
  stack_t stack_before;
  std::vector<u8> memory;

  Signals() : memory(size) {
    stack_t stack = {};
    stack.ss_sp = memory.data();
    stack.ss_size = size;
    sigaltstack(&stack, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (size_t i = 0; i < sizeof SIGNALS / sizeof *SIGNALS; i++) sigaction(SIGNALS[i], &action, &before[i]);
  }
  ~Signals() {
    for (size_t i = 0; i < sizeof SIGNALS / sizeof *SIGNALS; i++) sigaction(SIGNALS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
  }
};

// ---- fibers

__attribute__((noinline)) void switch_out() {
  if (_setjmp(M.running->where) == 0) _longjmp(M.scheduler, 1);
}

void fiber() {
  for (;;) {
    M.call(M.kernel, M.params);
    Lane& lane = *M.running;
    if (!lane.copies.empty()) fail("the thread returns with lane copies in flight");
    Warp& warp = M.warps[lane.index / WARP];
    if (warp.arrived || M.block_arrived) {
      for (u32 i = 0; i < M.launch.threads; i++) {
        const Lane& other = M.lanes[i];
        if (other.state == AT_BLOCK || (other.state == AT_WARP && other.index / WARP == lane.index / WARP))
          fail("the thread returns while thread %u waits for it in %s at %s:%d", i, other.site.what, other.site.file, other.site.line);
      }
    }
    warp.returned++;
    M.block_returned++;
    lane.state = RETURNED;
    switch_out();
  }
}

__attribute__((noinline)) void resume(Lane& lane) {
  M.running = &lane;
  const u32 x = blockDim.x;
  threadIdx = {lane.index % x, 0, 0};
  if (_setjmp(M.scheduler) == 0) {
    if (lane.started) _longjmp(lane.where, 1);
    lane.started = true;
    setcontext(&lane.first);
  }
  if (!M.failed) M.running = nullptr;
}

void make_fibers() {
  for (u32 i = 0; i < M.launch.threads; i++) {
    Lane& lane = M.lanes[i];
    lane.index = i;
    lane.started = false;
    getcontext(&lane.first);
    lane.first.uc_stack.ss_sp = M.stacks + i * STACK;
    lane.first.uc_stack.ss_size = STACK;
    lane.first.uc_link = nullptr;
    makecontext(&lane.first, fiber, 0);
  }
}

// ---- collective calls

void check_same_call(const Site& site, u32 arrived, Lane*& first) {
  if (!arrived)
    first = M.running;
  else if (site != first->site)
    fail("%s at %s:%d, but thread %u is in %s at %s:%d", site.what, site.file, site.line, first->index, first->site.what,
         first->site.file, first->site.line);
}

// Lane i's arguments are in lanes[i].in; the last lane to arrive computes every lane's `out`.
template <class Compute>
void collective(const Site& site, Compute compute) {
  Lane& lane = *M.running;
  Warp& warp = M.warps[lane.index / WARP];
  Lane* lanes = M.lanes + lane.index / WARP * WARP;
  if (warp.returned) fail("%s at %s:%d, but a lane of the warp has returned", site.what, site.file, site.line);
  lane.site = site;
  check_same_call(site, warp.arrived, warp.first);
  if (++warp.arrived < WARP) {
    lane.state = AT_WARP;
    switch_out();
    return;
  }
  warp.arrived = 0;
  compute(lanes);
  for (u32 i = 0; i < WARP; i++) lanes[i].state = READY;
}

void block_barrier(const Site& site) {
  Lane& lane = *M.running;
  if (M.block_returned) fail("%s at %s:%d, but a thread of the block has returned", site.what, site.file, site.line);
  lane.site = site;
  check_same_call(site, M.block_arrived, M.first_in_block);
  if (++M.block_arrived < M.launch.threads) {
    lane.state = AT_BLOCK;
    switch_out();
    return;
  }
  M.block_arrived = 0;
  for (u32 i = 0; i < M.launch.threads; i++) M.lanes[i].state = READY;
}

// ---- shared memory

u32 address_of(const void* p, const Site& site) {
  const u8* byte = static_cast<const u8*>(p);
  if (byte < M.shared || byte > M.shared + M.launch.shared_bytes)
    fail("%s at %s:%d: %p is not in the block's shared memory", site.what, site.file, site.line, p);
  return static_cast<u32>(byte - M.shared) + SHARED_BASE;
}

u8* shared_pointer(u32 address, u32 bytes, const Site& site) {
  const i64 offset = static_cast<i64>(address) - SHARED_BASE;
  if (offset < 0 || offset + bytes > M.launch.shared_bytes)
    fail("%s at %s:%d: bytes %lld to %lld of a block with %u bytes of shared memory", site.what, site.file, site.line, offset,
         offset + bytes, M.launch.shared_bytes);
  return M.shared + offset;
}

Copy start_copy(u32 destination, const void* source, u32 bytes, const Site& site) {
  if (destination % 16 || reinterpret_cast<u64>(source) % 16 || bytes % 16 || !bytes)
    fail("%s at %s:%d: destination %u, source %p or size %u is no multiple of 16 bytes", site.what, site.file, site.line,
         destination - SHARED_BASE, source, bytes);
  memset(shared_pointer(destination, bytes, site), POISON, bytes);
  for (u32 i = 0; i < bytes / 16; i++) {
    u8& busy = M.in_flight[(destination - SHARED_BASE) / 16 + i];
    if (busy)
      fail("%s at %s:%d: another copy to byte %u is in flight", site.what, site.file, site.line, destination - SHARED_BASE + 16 * i);
    busy = 1;
  }
  return {destination, bytes, source, 0};
}

void finish_copy(const Copy& copy) {
  const u32 offset = copy.destination - SHARED_BASE;
  memcpy(M.shared + offset, copy.source, copy.bytes);
  memset(M.in_flight.data() + offset / 16, 0, copy.bytes / 16);
}

u64 barrier_mark(u32 address) { return 0x7ff4ba441e400000ull ^ address; }

Barrier& barrier_at(u32 address, const Site& site) {
  if (address % 8) fail("%s at %s:%d: the barrier's address is no multiple of 8", site.what, site.file, site.line);
  const u8* memory = shared_pointer(address, 8, site);
  const auto found = M.barriers.find(address);
  if (found == M.barriers.end()) fail("%s at %s:%d: no barrier was initialised there", site.what, site.file, site.line);
  const u64 mark = barrier_mark(address);
  if (memcmp(memory, &mark, 8)) fail("%s at %s:%d: the barrier was written over", site.what, site.file, site.line);
  return found->second;
}

void complete_phase(Barrier& barrier) {
  if (!barrier.arrived || barrier.transactions) return;
  barrier.arrived = false;
  barrier.phase++;
}

// Whether the phase of that parity is over; lets copies land that this depends on.
bool phase_is_over(Barrier& barrier, u32 parity) {
  if ((barrier.phase & 1) != parity) return true;
  std::vector<Copy> copies;
  copies.swap(barrier.copies);
  for (const Copy& copy : copies) {
    finish_copy(copy);
    barrier.transactions -= copy.bytes;
  }
  complete_phase(barrier);
  return (barrier.phase & 1) != parity;
}

// ---- scheduler

// Runs the warp until no lane can go on, at most `turns` times. Returns whether a lane could.
bool run_warp(u32 warp, u64 turns) {
  bool moved = false;
  for (u64 turn = 0; turn < turns; turn++) {
    const u64 random = M.launch.seed ? random_number() : 0;
    const u32 first = random & 31, step = M.launch.seed ? (random >> 8 & 31) | 1 : 1;
    bool now = false;
    for (u32 i = 0; i < WARP; i++) {
      Lane& lane = M.lanes[warp * WARP + ((first + i * step) & 31)];
      if (lane.state == AT_BARRIER) {
        M.running = &lane;  // whose fault it is if a copy's source cannot be read
        if (_setjmp(M.scheduler) == 0 && phase_is_over(M.barriers.at(lane.barrier), lane.parity)) lane.state = READY;
        if (M.failed) return true;
        M.running = nullptr;
      }
      if (lane.state != READY) continue;
      resume(lane);
      if (M.failed) return true;
      now = true;
    }
    if (!now) break;
    moved = true;
  }
  return moved;
}

void report_deadlock() {
  char text[900];
  size_t length = 0;
  text[0] = 0;
  for (u32 i = 0; i < M.launch.threads && length < sizeof text - 300;) {
    const Lane& lane = M.lanes[i];
    const auto alike = [&](const Lane& other) { return other.state == lane.state && (lane.state == RETURNED || !(other.site != lane.site)); };
    u32 end = i + 1;
    while (end < M.launch.threads && alike(M.lanes[end])) end++;
    char detail[160] = "";
    if (lane.state == AT_BARRIER) {
      const Barrier& barrier = M.barriers.at(lane.barrier);
      snprintf(detail, sizeof detail, " (phase %u, parity %u, %s, %lld bytes missing)", barrier.phase, lane.parity,
               barrier.arrived ? "arrived" : "no arrival", barrier.transactions);
    }
    if (lane.state == RETURNED)
      length += snprintf(text + length, sizeof text - length, " threads %u to %u returned;", i, end - 1);
    else
      length += snprintf(text + length, sizeof text - length, " threads %u to %u wait in %s at %s:%d%s;", i, end - 1, lane.site.what,
                         lane.site.file, lane.site.line, detail);
    length = std::min(length, sizeof text - 1);
    i = end;
  }
  report("nothing can go on:%s", text);
}

void check_end_of_block() {
  for (const auto& [address, barrier] : M.barriers) {
    if (!barrier.copies.empty())
      return report("the block ends with copies in flight to barrier at byte %u of shared memory", address - SHARED_BASE);
    if (barrier.arrived)
      return report("the block ends while the barrier at byte %u of shared memory expects %lld bytes", address - SHARED_BASE,
                    barrier.transactions);
  }
  const u8 *first = M.reserved + GUARD, *end = first + MAX_SHARED;
  for (const u8* p = M.shared - 4096; p < M.shared; p++)
    if (*p != CANARY) return report("a write %lld bytes before shared memory", static_cast<i64>(M.shared - p));
  for (const u8* p = M.shared + M.launch.shared_bytes; p < end; p++)
    if (*p != CANARY) return report("a write to shared memory at byte %lld of %u", static_cast<i64>(p - M.shared), M.launch.shared_bytes);
}

void run_block() {
  const u32 threads = M.launch.threads, warps = threads / WARP;
  for (u32 i = 0; i < threads; i++) {
    Lane& lane = M.lanes[i];
    lane.state = READY;
    lane.site = {};
    lane.copies.clear();
    lane.committed = 0;
  }
  memset(M.warps, 0, sizeof M.warps);
  M.block_arrived = M.block_returned = 0;
  M.barriers.clear();
  std::fill(M.in_flight.begin(), M.in_flight.end(), 0);
  memset(M.shared, POISON, M.launch.shared_bytes);
  std::vector<u32> order(warps);
  std::iota(order.begin(), order.end(), 0u);
  while (M.block_returned < threads) {
    bool moved = false;
    if (M.launch.seed)
      for (u32 i = warps; i > 1; i--) std::swap(order[i - 1], order[random_number() % i]);
    for (u32 warp : order) {
      moved |= run_warp(warp, M.launch.seed ? 1ull << random_number() % 8 : ~0ull);
      if (M.failed) return;
    }
    if (!moved) return report_deadlock();
  }
  check_end_of_block();
}

u8* reserve(u64 bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : static_cast<u8*>(p);
}

void run_grid() {
  const Launch& launch = M.launch;
  M.random_state = launch.seed;
  M.leader = launch.seed ? random_number() % WARP : 0;
  M.running = nullptr;
  M.failed = false;
  M.stacks = reserve(launch.threads * STACK);
  M.reserved = reserve(2 * GUARD + MAX_SHARED);
  if (!M.stacks || !M.reserved) return report("no memory for %u threads", launch.threads);
  mprotect(M.reserved, GUARD, PROT_NONE);
  mprotect(M.reserved + GUARD + MAX_SHARED, GUARD, PROT_NONE);
  M.shared = M.reserved + GUARD + MAX_SHARED - (launch.shared_bytes + 127) / 128 * 128;
  memset(M.shared - 4096, CANARY, M.reserved + GUARD + MAX_SHARED - M.shared + 4096);
  M.in_flight.assign(launch.shared_bytes / 16 + 1, 0);
  blockDim = {launch.threads, 1, 1};
  gridDim = launch.grid;
  make_fibers();
  std::vector<u64> order(static_cast<u64>(launch.grid.x) * launch.grid.y * launch.grid.z);
  std::iota(order.begin(), order.end(), 0ull);
  if (launch.seed)
    for (u64 i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random_number() % i]);
  const Signals signals;
  for (u64 block : order) {
    blockIdx = {static_cast<u32>(block % launch.grid.x), static_cast<u32>(block / launch.grid.x % launch.grid.y),
                static_cast<u32>(block / launch.grid.x / launch.grid.y)};
    run_block();
    if (M.failed) break;
  }
}

// Runs a kernel whose only parameter is a P. Returns 0, or 1 with a message in launch.error.
template <class P>
int run(void (*kernel)(P), const Launch& launch, const void* params, u64 params_size) {
  snprintf(launch.error, launch.error_size, "%s", "");
  M.launch = launch;
  blockIdx = {0, 0, 0};
  if (params_size != sizeof(P)) {
    snprintf(launch.error, launch.error_size, "the launch passes %llu bytes of parameters, the kernel takes %zu", params_size, sizeof(P));
    return 1;
  }
  alignas(P) u8 copy[sizeof(P)];
  memcpy(copy, params, sizeof(P));
  M.kernel = reinterpret_cast<void (*)()>(kernel);
  M.call = [](void (*function)(), const void* p) { reinterpret_cast<void (*)(P)>(function)(*static_cast<const P*>(p)); };
  M.params = copy;
  run_grid();
  if (M.stacks) munmap(M.stacks, launch.threads * STACK);
  if (M.reserved) munmap(M.reserved, 2 * GUARD + MAX_SHARED);
  M.stacks = M.reserved = nullptr;
  return M.failed;
}

}  // namespace
}  // namespace emulator
