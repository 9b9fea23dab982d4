"""Which plan, will it fit, how fast, why: what a step costs on a machine, found without the machine.

`workload` says what a model's step consists of, `pace` how long its blocks take, `room` how much memory it needs,
`estimate` puts them together for one plan, `search` looks through all of them. `planner/constants.py` has every constant that was
fitted to measurements, and `bench/planner.py` how well that works on published ones.
"""
