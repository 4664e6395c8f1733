"""From a tenant's module to data, in a process of its own. `sources` says what a factory returns.

    python -m coissue.deployments.capture JOB.json FOLDER

JOB.json is an `artifact.CaptureJob`. Exit 0: FOLDER holds an `artifact.Artifact` and one JSON line
on stdout describes it. Exit 3: the model cannot be captured, and the line is
`{"error": sentence, "op": ..., "where": module path}`. What the tenant's code prints goes to
stderr. Of this package only `artifact` may be imported where torch must not be.
"""
