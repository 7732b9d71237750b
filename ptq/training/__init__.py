"""Baselines: networks trained plainly, with quantization in the loop, and through compressed transfers.

``loop`` is the one training loop; ``qat``, ``pipeline`` and ``replicas`` plug their engines into it. ``stage`` and
``gradients`` compress what travels between processes, ``record`` measures what that does, ``baselines`` trains a task
into a folder, and ``comparison`` puts the results side by side.
"""
