//! What was learned of collectives just before a change of the network was found: it may have been the change, which latencies and tests show
//! some seconds after steps.

use super::{Exchange, Key, OF_COLLECTIVE};
use crate::changes::SAME_S;
use crate::joint::Normal;
use flexcomm_domain::Collective;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What was believed of a collective's factor so long ago.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Recent {
    collective: Collective,
    before: Normal,
    seconds: f64,
}

impl Exchange {
    /// So many seconds have passed.
    pub(super) fn age_recent(&mut self, seconds: f64) {
        self.recent.iter_mut().for_each(|recent| recent.seconds += seconds);
        self.recent.retain(|recent| recent.seconds < SAME_S);
    }

    /// Steps of these collectives are about to be learned from.
    pub(super) fn note_recent(&mut self, collectives: &BTreeSet<Collective>) {
        for collective in collectives {
            if self.recent.iter().all(|recent| recent.collective != *collective) {
                let at = self.joint.place(&Key::Collective(*collective), OF_COLLECTIVE);
                self.recent.push(Recent { collective: *collective, before: self.joint.of(at), seconds: 0.0 });
            }
        }
    }

    /// The network has changed: factors that have moved by more than they were in doubt are what they were before.
    pub(super) fn undo_recent(&mut self) {
        for Recent { collective, before, .. } in std::mem::take(&mut self.recent) {
            let Some(at) = self.joint.find(&Key::Collective(collective)) else { continue };
            let is = self.joint.of(at);
            if (is.mean - before.mean).abs() > before.sd {
                self.joint.revert(at, Normal::new(before.mean, before.sd.max(is.sd)), 0.0);
            }
        }
    }
}
