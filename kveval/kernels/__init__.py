"""The Python side of the CUDA kernels whose sources lie in kernels/.

compiler.py turns a source into machine code and keeps it on disk, cubin.py reads that code's registers and stack,
launcher.py loads and launches it, support.py says what works on a machine and why the rest does not, manifest.py lists
what is checked. The ops that the cache calls are in ops.py.
"""
