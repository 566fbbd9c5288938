//! QSGD (Alistarh et al. 2017): each value of a bucket becomes ‖x‖ sign(x) l/s, where l is one of the two whole numbers
//! next to s|x|/‖x‖, drawn so that the mean is x.
//!
//! Section 3.1 defines it for a whole vector with the Euclidean norm (`bucket=0`), section 4 splits vectors into
//! buckets with a norm each and section 5 also takes the largest magnitude as norm. GRACE (section 3.1) prints the two
//! chances the wrong way round; with them the mean would not be x.
//!
//! Payload, `coding=packed`: norms, f32 each; l + s as `levels(⌈log2(2s+1)⌉)`. `gamma` and `delta` (section 3.1, Code_s):
//! norms; bytes of what follows, u32; per value that is not 0 its distance from the one before (the first counts from
//! −1) in Elias' code, a sign bit, |l| in Elias' code; at last the distance to n. `least`: as packed, or sparse.

use super::elias::Elias;
use super::levels::{Bucketed, Coding};
use super::linear::Linear;
use super::scheme::{Norm, Scheme};
use crate::entry::Entry;
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::QSGD,
    code: 25,
    examples: &[
        "s=4",
        "s=1,bucket=0",
        "s=127,norm=max",
        "s=15,bucket=7,norm=max",
        "s=4,bucket=0,coding=gamma",
        "s=2,bucket=100,coding=delta",
        "s=2,bucket=0,coding=packed",
    ],
    build: |values, shape| {
        let norm = if values.whole(2) == 0 { Norm::Euclidean } else { Norm::Max(1.0) };
        let scheme = Scheme::<Linear>::symmetric(norm, values.whole(0) as u32);
        let (n, bucket) = (shape.values(), values.whole(1));
        let coding = match values.whole(3) {
            0 => return Box::new(Bucketed::new(scheme, n, bucket)),
            1 => Coding::Elias(Elias::Gamma),
            2 => Coding::Elias(Elias::Delta),
            _ => Coding::Packed,
        };
        Box::new(Bucketed::in_coding(scheme, (n, bucket), coding))
    },
};
