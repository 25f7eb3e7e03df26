"""What tenure costs, as ratios against a peer or a floor measured in the same run.

``make bench`` runs all of it. These are measurements, not tests: a machine's speed drifts, so
that only figures taken side by side, in turn, say anything.
"""
