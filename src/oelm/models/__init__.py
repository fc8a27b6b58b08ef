"""Our own transformer (one block for language models and classifiers) and Hugging Face models by name.

Owns shapes, presets and building. Refuses training, data and anything about freezing: that is oelm.method.
"""
