"""The simulator: a run of the real ledger in simulated time. `python -m launch.simulate --help` tells how to run it.

speeds      how fast engines and the trainer are          workload    how long completions are, and their grading
scenario    what is simulated                             engine      continuous batching, in closed form between events
simulation  the events, and the ledger that they drive    report      what came of it: figures, table
timeline    for Perfetto        plot    one HTML page     compare     systems and knobs, same work and hardware
measured    calibrated on the first half of a real run, it predicts the second
"""
