//! signSGD with majority vote (Bernstein et al. 2018 and 2019): each rank sends the sign of each value; together they mean
//! the sign of the sum of signs, 0 on a tie. Every other value is +1 or −1: the learning rate is to be chosen for that.
//!
//! Payload: signs.

use super::onebit::{OneBit, Sign};
use crate::entry::Entry;
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::SIGNSGD,
    code: 21,
    examples: &[""],
    build: |_, shape| Box::new(OneBit::new(Sign::Vote, shape)),
};
