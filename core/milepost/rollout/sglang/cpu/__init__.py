"""Stand-ins for packages that SGLang imports and does not use on a CPU; see the README here."""
