"""Planning: from a study to arms and trials with keys.  Builds no model and reads no pixels."""
