//! Tests of single hybrid methods beyond what `all.rs` asks of every one.
