"""The devices of this machine: what there is and how it fares, behind the seam ``GpuReader``.

``choose.py`` picks a reader, ``nvml.py`` and ``simulated.py`` are readers. Which of the devices belong to this task
is not decided here but in ``allocation``.
"""
