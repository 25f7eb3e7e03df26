"""Parts that engines share.

``watchers`` keeps an engine's local watches by name and by session.
"""
