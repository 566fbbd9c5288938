//! Hard threshold (Strom 2015, "Scalable distributed DNN training using commodity GPU cloud computing"; GRACE 3.3): of values
//! with a magnitude above tau the sign is sent, and stands for ±tau. With error feedback the rest follows later.
//!
//! Strom packs each value into 32 bits, 31 for the index; here indices are a set in its least coding, and signs have a
//! bit each.

use super::super::sparsification::sparse::Pick;
use super::signed::{Choose, Sent, Signed};
use crate::Selection;
use crate::codec::Context;
use crate::entry::Entry;
use crate::kernels::key;
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::HARDTHRESHOLD,
    code: 113,
    examples: &["tau=0.5", "tau=2", "tau=1000000"],
    build: |values, shape| {
        // Numbers beyond f32's on either side become its last ones.
        let tau = (values.number(0).min(f64::from(f32::MAX)) as f32).max(f32::from_bits(1));
        Box::new(Signed::new(HardThreshold { tau }, shape))
    },
};

#[derive(Debug)]
struct HardThreshold {
    tau: f32,
}

impl Choose for HardThreshold {
    fn magnitude(&self) -> Option<f32> {
        Some(self.tau)
    }

    fn choose(&mut self, x: &[f32], context: &Context, selection: &mut Selection) -> Sent {
        let tau = key(self.tau);
        context.kernel.run(Pick { x, selection: &mut *selection, admits: |_, x| key(x) > tau });
        Sent { magnitudes: [self.tau; 2], energy: selection.len() as f64 * f64::from(self.tau).powi(2) }
    }
}
