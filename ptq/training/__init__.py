"""Baselines: networks trained plainly, with quantization in the loop, and through compressed transfers.

``loop`` is the one training loop; ``qat``, ``pipeline`` and ``replicas`` plug their engines into it. ``stage`` and
``gradients`` compress what travels between processes, ``record`` measures what that does, ``baselines`` trains a task
into a folder, ``candidates`` and ``comparison`` put the results side by side at equal bits, ``precision`` one network
at every precision, and ``text`` gives text classifiers the form that is trained here.
"""
