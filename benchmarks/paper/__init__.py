"""The experiments of the PagedAttention paper on memory (Kwon et al., "Efficient Memory Management
for Large Language Model Serving with PagedAttention", SOSP 2023), on Pagefleet's own scheduler.
"""
