//! The candidates of a decision: ratios, compressors, collectives. Dense is always among them.

use flexcomm_domain::{Collective, CompressionRatio, Compressor, Selection, Strategy};
use serde::{Deserialize, Serialize};

/// The paper's candidate ratios: c_high/3^i down to c_low, rounded as it prints them.
pub const DEFAULT_CRS: [f64; 5] = [0.1, 0.033, 0.011, 0.004, 0.001];

/// Most ratios in a space: bounds one decision's work.
pub const MAX_CRS: usize = 64;

/// Which strategies may be chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Space {
    /// Ratios below 1; dense is added by itself.
    pub crs: Vec<CompressionRatio>,
    /// Enabled compressors; `none` here has no effect.
    pub compressors: Vec<Compressor>,
    /// Enabled collectives. Without a dense one, dense-ring is still a candidate.
    pub collectives: Vec<Collective>,
    /// Worker selection for the art collectives.
    pub selection: Selection,
}

impl Default for Space {
    /// The paper's ratios, exact top-k, every collective, STAR.
    fn default() -> Self {
        Self {
            crs: DEFAULT_CRS.iter().filter_map(|&c| CompressionRatio::new(c).ok()).collect(),
            compressors: vec![Compressor::TopK],
            collectives: Collective::ALL.to_vec(),
            selection: Selection::Star,
        }
    }
}

impl Space {
    /// Every valid strategy once, dense first, in one fixed order. At most [`MAX_CRS`] ratios are used.
    pub fn strategies(&self) -> Vec<Strategy> {
        let mut all: Vec<Strategy> =
            self.collectives.iter().filter_map(|&collective| Strategy::dense(collective).ok()).collect();
        if all.is_empty() {
            all.push(Strategy::DENSE_RING);
        }
        for &compressor in self.compressors.iter().filter(|&&c| c != Compressor::None) {
            for &collective in self.collectives.iter().filter(|c| !c.is_dense()) {
                let selection = collective.is_art().then_some(self.selection);
                let ratios = self.crs.iter().take(MAX_CRS).filter(|c| !c.is_dense());
                // Pairs that do not fit (LWTopk with AR-Topk) are no candidates.
                all.extend(ratios.filter_map(|&cr| Strategy::new(compressor, cr, collective, selection).ok()));
            }
        }
        without_repeats(all)
    }
}

fn without_repeats(all: Vec<Strategy>) -> Vec<Strategy> {
    let mut seen: Vec<Strategy> = Vec::with_capacity(all.len());
    for strategy in all {
        if !seen.contains(&strategy) {
            seen.push(strategy);
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cr(c: f64) -> CompressionRatio {
        CompressionRatio::new(c).unwrap()
    }

    #[test]
    fn default_space_is_dense_and_three_sparse_collectives() {
        let all = Space::default().strategies();
        assert_eq!(all.len(), 2 + 3 * 5);
        assert_eq!(all[0], Strategy::DENSE_RING);
    }

    #[test]
    fn dense_is_always_there() {
        let space = Space { collectives: vec![Collective::Allgather], ..Space::default() };
        assert_eq!(space.strategies()[0], Strategy::DENSE_RING);
        let space = Space { collectives: vec![], crs: vec![], ..Space::default() };
        assert_eq!(space.strategies(), vec![Strategy::DENSE_RING]);
    }

    #[test]
    fn pairs_that_do_not_fit_and_repeats_are_left_out() {
        let space = Space {
            compressors: vec![Compressor::LwTopK, Compressor::LwTopK, Compressor::None],
            crs: vec![cr(0.1), cr(0.1), cr(1.0)],
            ..Space::default()
        };
        let all = space.strategies();
        assert_eq!(all.len(), 3, "{all:?}");
        assert_eq!(all[2].collective(), Collective::Allgather);
    }
}
