"""What happens inside: flight recorder, stall report, metrics, and events for plugins.

`observation.Observation` puts together what the configuration asks for, one per
connection.  Nothing of it runs on the data path unless it was asked for.
"""
