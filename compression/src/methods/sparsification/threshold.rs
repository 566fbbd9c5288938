//! Threshold-v (Dutta et al. 2020; GRACE 3.2): every value whose magnitude is larger than v. How many these are depends on
//! the values; with a threshold that none exceeds, nothing is sent.

use super::sparse::{Choose, Pick, Sparse};
use crate::Selection;
use crate::codec::{Context, EncodeError, Stats};
use crate::entry::Entry;
use crate::kernels::key;
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::THRESHOLD,
    code: 66,
    examples: &["v=0.5", "v=3", "v=1000000"],
    build: |values, shape| {
        Box::new(Sparse::new(shape.values(), Above { n: shape.values(), v: values.number(0) as f32 }))
    },
};

#[derive(Debug)]
struct Above {
    n: usize,
    v: f32,
}

impl Choose for Above {
    const FIXED: bool = false;

    fn most(&self) -> usize {
        self.n
    }

    fn choose(&mut self, x: &[f32], context: &Context, selection: &mut Selection) -> Result<Stats, EncodeError> {
        let stats = context.stats(x)?;
        let v = key(self.v);
        context.kernel.run(Pick { x, selection, admits: |_, x| key(x) > v });
        Ok(stats)
    }
}
