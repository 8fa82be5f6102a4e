"""The tests. A folder that is a package has fixtures that end with its last test, and one process
runs all of it (`tests.distribution`).
"""
