//! Memories and momenta around codecs.

use crate::harness::*;

#[test]
fn vanilla_conserves_around_every_codec() {
    for strategy in every_strategy() {
        assert_error_feedback_conserves(&strategy.to_string());
    }
}
