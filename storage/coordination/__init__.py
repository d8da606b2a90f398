"""How services coordinate through the store: leases, heartbeats, and the life cycle of a
service.
"""
