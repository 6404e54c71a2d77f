"""The simulator: a run of the real ledger in simulated time. `python -m launch.simulate --help` tells how to run it.

scenario            what is simulated: rules, hardware, work, faults
workload            how long completions and their grading are
speeds              how fast engines and the trainer are
simulated_engine    continuous batching between events
simulated_fleet     engines and judges
simulated_trainer   take, train, push, checkpoint
simulation          the events, and the ledger that they drive
simulation_report   figures and tables of a simulated run
compare_systems     systems and settings side by side
timeline, plot      a trace, and an HTML page
measured_run, fit   the first half of a real run calibrates the simulator
prediction          the calibrated simulator predicts the second half
"""
