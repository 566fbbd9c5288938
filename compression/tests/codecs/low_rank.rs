//! Tests of single low_rank methods beyond what `all.rs` asks of every one.
