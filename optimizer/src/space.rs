//! The candidates of a decision: ratios, compressors, collectives. Dense is always among them.

use flexcomm_domain::{Collective, CompressionRatio, Family, Selection, Strategy};
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
    pub compressors: Vec<Family>,
    /// Enabled collectives. Without a dense one, dense-ring is still a candidate.
    pub collectives: Vec<Collective>,
    /// Worker selections for the art collectives: each is a candidate.
    pub selections: Vec<Selection>,
}

impl Default for Space {
    /// The paper's ratios, exact top-k with error feedback, every collective, STAR.
    fn default() -> Self {
        Self {
            crs: DEFAULT_CRS.iter().filter_map(|&c| CompressionRatio::new(c).ok()).collect(),
            compressors: "topk".parse().into_iter().collect(),
            collectives: Collective::ALL.to_vec(),
            selections: vec![Selection::Star],
        }
    }
}

impl Space {
    /// Every valid strategy once, dense first, in one fixed order. At most [`MAX_CRS`] ratios are used.
    pub fn strategies(&self) -> Vec<Strategy> {
        let mut all: Vec<Strategy> =
            distinct(&self.collectives).filter_map(|&collective| Strategy::dense(collective).ok()).collect();
        if all.is_empty() {
            all.push(Strategy::DENSE_RING);
        }
        for family in distinct(&self.compressors).filter(|family| !family.is_none()) {
            for &collective in distinct(&self.collectives) {
                let selections = self.selections(collective);
                all.extend(selections.flat_map(|selection| self.of(family, collective, selection)));
            }
        }
        all
    }

    /// Worker selections that a collective is a candidate with.
    pub fn selections(&self, collective: Collective) -> impl Iterator<Item = Option<Selection>> {
        let none = (!collective.is_art()).then_some(None);
        none.into_iter().chain(distinct(&self.selections).copied().map(Some).filter(move |_| collective.is_art()))
    }

    /// One compressor by one collective, at every ratio where it has any; nothing where the two do not fit.
    pub fn of(&self, family: &Family, collective: Collective, selection: Option<Selection>) -> Vec<Strategy> {
        let once = [CompressionRatio::DENSE];
        let ratios = if family.has_ratio() { &self.crs[..self.crs.len().min(MAX_CRS)] } else { &once[..] };
        let specs = distinct(ratios).filter_map(|&cr| family.at(cr).ok());
        specs.filter_map(|spec| Strategy::fitting(spec, collective, selection)).collect()
    }
}

/// Each once, in its first place.
fn distinct<T: PartialEq>(all: &[T]) -> impl Iterator<Item = &T> {
    all.iter().enumerate().filter(|(at, one)| !all[..*at].contains(one)).map(|(_, one)| one)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_domain::Pattern;

    /// How many collectives do that.
    fn by(pattern: Pattern) -> usize {
        Collective::ALL.iter().filter(|collective| collective.pattern() == pattern).count()
    }

    fn cr(c: f64) -> CompressionRatio {
        CompressionRatio::new(c).unwrap()
    }

    #[test]
    fn default_space_is_dense_and_the_sparse_collectives() {
        let all = Space::default().strategies();
        assert_eq!(all.len(), by(Pattern::Allreduce) + (by(Pattern::Allgather) + by(Pattern::ArTopk)) * 5);
        assert_eq!(all[0], Strategy::DENSE_RING);
    }

    #[test]
    fn what_has_one_ratio_is_there_once_by_what_it_travels_by() {
        let compressors = ["fp16", "qsgd(s=7)+ef(vanilla)"].map(|text| text.parse().unwrap()).to_vec();
        let all = Space { compressors, ..Space::default() }.strategies();
        let texts: Vec<String> = all.iter().skip(by(Pattern::Allreduce)).map(ToString::to_string).collect();
        let sums = Collective::ALL.iter().filter(|collective| collective.is_allreduce());
        let mut expected: Vec<String> = sums.map(|collective| format!("fp16/{collective}")).collect();
        expected.push("qsgd(s=7)+ef(vanilla)/allgather".into());
        assert_eq!(texts, expected);
    }

    #[test]
    fn both_worker_selections_compete() {
        let space = Space { selections: Selection::ALL.to_vec(), crs: vec![cr(0.01)], ..Space::default() };
        let art = space.strategies().into_iter().filter(|s| s.collective().is_art());
        let selections: Vec<_> = art.map(|s| (s.collective(), s.selection().unwrap())).collect();
        assert_eq!(selections.len(), 2 * by(Pattern::ArTopk), "{selections:?}");
        assert!(selections.contains(&(Collective::ArtTree, Selection::Var)));
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
            compressors: vec!["fp16".parse().unwrap(), "fp16".parse().unwrap(), Family::NONE],
            crs: vec![cr(0.1), cr(0.1), cr(1.0)],
            ..Space::default()
        };
        let all = space.strategies();
        assert_eq!(all.len(), 2 * by(Pattern::Allreduce), "{all:?}");
        assert!(all.iter().all(|strategy| strategy.collective().is_allreduce()));
    }
}
