"""The planner: what a run costs on a cluster, before it has one. Pure arithmetic; only `__main__` knows Hydra.

python -m launch.plan experiment=kestrel_256 [overrides]     tables; plan.out=plan.json, plan.figures=plan.html write files
python -m launch.plan check=points.csv                       predicts measured decode latencies and prints the errors
"""
