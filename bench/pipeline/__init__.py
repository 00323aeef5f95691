"""Other planners of pipelines, and settings to plan for; `python -m bench.planner` runs them."""
