//! Tests of single sparsification methods beyond what `all.rs` asks of every one.
