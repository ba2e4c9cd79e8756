"""Pipeline parallelism: schedules as data, their checker and simulator, and the engine that runs them."""
