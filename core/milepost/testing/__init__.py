"""The conformance kit: promises every plugin keeps, as functions pytest can call."""
