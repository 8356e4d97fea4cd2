"""`kveval bench`: how long the kernels take, beside what they are to be compared with.

record.py is what is kept, shapes.py what can be asked for, timers.py how time is taken, caches.py packed caches of
random tokens, decode.py, append.py and steps.py what is timed, references.py torch's and FlashInfer's attention,
model_steps.py a whole model, warm.py compiles ahead, bench.py puts it together, tables.py and plot.py show it.
"""
