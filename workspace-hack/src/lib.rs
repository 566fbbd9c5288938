//! Nothing: the manifest alone matters.
