"""Pipeline parallelism: schedules, their checks and simulation, and the engine that executes them."""
