"""The devices of this machine: what there is and how it fares, behind the seam ``GpuReader``.

``choose.py`` picks a reader and says why. Readers: ``nvml.py`` (with ``dcgm.py`` around it), ``nvidia_smi.py``,
``amd.py``, ``simulated.py``, ``replay.py``, and ``nothing.py`` where none of them works. Which of the devices belong to
this task is not decided here but in ``allocation``.
"""
