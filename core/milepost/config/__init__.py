"""The run config: schema, loading, plan. Imports no torch."""
