"""A step's options, its job's name, and its workers' pods; used by routing and the launcher. Pure, without kfp."""
