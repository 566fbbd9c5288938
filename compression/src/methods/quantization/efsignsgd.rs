//! EFsignSGD's compressor (Karimireddy et al. 2019): sign(x) ‖x‖₁ / n per tensor. Its error feedback is the memory `efsign`,
//! with gamma the learning rate: `efsignsgd+ef(efsign)` is the whole of algorithm 1.
//!
//! Contractive with delta = ‖x‖₁² / (n ‖x‖₂²) ≥ 1/n (remark 6). The values sent and their bytes are those of
//! `onebit(scaling=true)`: ⌈n/8⌉ bytes of signs, a set bit for x < 0, then ‖x‖₁ / n in 4 bytes.

use super::onebit::{OneBit, Sign};
use crate::entry::Entry;
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::EFSIGNSGD,
    code: 23,
    examples: &[""],
    build: |_, shape| Box::new(OneBit::new(Sign::Mean, shape)),
};
