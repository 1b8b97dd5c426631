"""Commands of administrators: clusters, projects, policies, reports, simulations and installations."""
