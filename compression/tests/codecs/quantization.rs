//! Tests of single quantization methods beyond what `all.rs` asks of every one.
