"""`hicache gpu-check`: what needs a GPU to be known, in one run of a few minutes.

Each check runs in a process of its own, since an error of CUDA's takes its process with it.
"""
