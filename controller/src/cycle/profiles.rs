//! What trials and shadows tell of each ratio.

use flexcomm_domain::{CompressionRatio, Gain, Selector, Strategy, Timestamp};
use flexcomm_estimation::{Profile, ProfilePoint, Times};
use flexcomm_planner::Profiles;
use std::collections::BTreeMap;

use crate::measure::{gain_over_ranks, median, slowest};
use crate::store::{TrialReportRow, TrialRow};

/// gain and t_comp per selector and ratio: the gain over all ranks and the slowest one's time, of the newest trial that ran it
/// live and of the newest whose shadows saw it. And `times`, of gradients of `size` (values, ranks), at the speed that this job's
/// machines have shown: in trials, and in the newest steps, of which strategy and seconds are given.
pub fn profiles(
    trials: &[TrialRow],
    reports: &[TrialReportRow],
    (times, size, steps): (&Times, (u64, usize), Option<(Strategy, f64)>),
) -> (Profiles, Times) {
    let ended: BTreeMap<u64, Timestamp> =
        trials.iter().filter(|t| t.state != "pending").filter_map(|t| Some((t.id, t.ended?))).collect();
    let of_ended = || reports.iter().filter(|r| ended.contains_key(&r.id));
    let mut points: BTreeMap<(Selector, u64), Point> = BTreeMap::new();
    for (report, outcome) in of_ended().flat_map(|r| r.outcomes.iter().map(move |o| (r, o))) {
        let Ok(strategy) = Strategy::try_from(&outcome.strategy) else { continue };
        // Trainers of earlier builds cut it to 1, which says nothing of the variance.
        let is_cut = strategy.spec().is_unbiased_without_memory() && outcome.gain >= 1.0;
        if !strategy.is_dense() && !is_cut {
            points.entry((strategy.selector(), strategy.cr().get().to_bits())).or_default().add(report, outcome);
        }
    }
    let shown = points.iter().filter(|(_, point)| point.live.weight > 0.0).filter_map(|((selector, ratio), point)| {
        let ratio = CompressionRatio::new(f64::from_bits(*ratio)).ok()?;
        Some(Shown { selector: *selector, ratio, seconds: point.live.comp_us() * 1e-6 })
    });
    let steps = steps.map(|(strategy, seconds)| Shown { selector: strategy.selector(), ratio: strategy.cr(), seconds });
    let times = times.clone().at_speed(speed(times, size, shown.chain(steps)).unwrap_or(1.0));
    let by_selector = by_selector(&points);
    let newest = points.values().flat_map(|p| [p.live.id, p.shadow.id]).max();
    // Shadows tell what they saw after their trial has ended; rank 0 speaks for all.
    let told = of_ended().filter(|r| r.rank == 0 && Some(r.id) == newest).map(|r| r.received).max();
    let ended_at = newest.and_then(|id| ended.get(&id)).copied().filter(|_| !by_selector.is_empty());
    let measured_at = ended_at.max(told).filter(|_| !by_selector.is_empty());
    let tried_at = points.values().map(|p| p.live.id).max().and_then(|id| ended.get(&id)).copied();
    let long_run = points.values().any(|p| p.shadow.weight > 0.0);
    (Profiles { by_selector, measured_at, tried_at, ended_at, long_run }, times)
}

/// What compressing was measured to take.
struct Shown {
    selector: Selector,
    ratio: CompressionRatio,
    seconds: f64,
}

/// Measured seconds over the table's: the median.
fn speed(times: &Times, size: (u64, usize), shown: impl Iterator<Item = Shown>) -> Option<f64> {
    let known = |x: &Shown| times.knows(x.selector.family);
    let ratio = |x: Shown| x.seconds / times.t_comp(x.selector, x.ratio, size);
    median(shown.filter(known).map(ratio).filter(|ratio| ratio.is_finite() && *ratio > 0.0))
}

fn by_selector(points: &BTreeMap<(Selector, u64), Point>) -> BTreeMap<Selector, Profile> {
    let mut of_selector: BTreeMap<Selector, Vec<ProfilePoint>> = BTreeMap::new();
    for ((selector, ratio), point) in points {
        // One rank that selects for all may be known from the trial alone (gradients on a device have no other shadow), which
        // overrates it as it overrates the compressor that selects for itself.
        let alone = || points.get(&(selector.family.into(), *ratio));
        let live = || point.live.gain().map(|live| live.powf(alone().map_or(1.0, Point::trial_bias)));
        let gain = match selector.selection {
            None => point.own(),
            Some(_) => point.shadow.gain().or_else(live),
        };
        if let Some(point) = gain.and_then(|gain| point.at(f64::from_bits(*ratio), gain)) {
            of_selector.entry(*selector).or_default().push(point);
        }
    }
    of_selector.into_iter().filter_map(|(selector, points)| Some((selector, Profile::new(points).ok()?))).collect()
}

/// Of one selector and ratio.
#[derive(Debug, Clone, Default)]
struct Point {
    live: Found,
    shadow: Found,
}

impl Point {
    fn add(&mut self, report: &TrialReportRow, o: &flexcomm_wire::TrialOutcome) {
        if o.iterations > 0 {
            self.live.add(report, (o.gain, o.energy), (o.comp_us, f64::from(o.iterations)));
        }
        if let Some(gain) = o.shadow_gain {
            self.shadow.add(report, (gain, o.shadow_energy), (0.0, 1.0));
        }
    }

    /// Gain of a rank that selects for itself: in the newest shadow where there is one. That of a newer trial is too high, and
    /// its shadows will tell soon.
    fn own(&self) -> Option<f64> {
        self.shadow.gain().or(self.live.gain())
    }

    /// The power by which the trial's gain is brought to the shadow's, which has run for longer.
    fn trial_bias(&self) -> f64 {
        let (Some(live), Some(own)) = (self.live.gain(), self.own()) else { return 1.0 };
        if live < 1.0 && own < 1.0 { (own.ln() / live.ln()).max(1.0) } else { 1.0 }
    }

    /// What only had a shadow has no time: 0.
    fn at(&self, ratio: f64, gain: f64) -> Option<ProfilePoint> {
        Some(ProfilePoint {
            cr: CompressionRatio::new(ratio).ok()?,
            gain: Gain::new(gain.min(1.0)).ok()?,
            t_comp_s: self.live.comp_us() * 1e-6,
            weight: if self.live.weight > 0.0 { self.live.weight } else { self.shadow.weight },
        })
    }
}

/// What the ranks found in one trial.
#[derive(Debug, Clone, Default)]
struct Found {
    id: u64,
    /// With the energies that they are shares of, where those are told.
    gains: Vec<(f64, Option<f64>)>,
    comp_us: Vec<(u32, f64)>,
    /// How many measurements stand behind it.
    weight: f64,
}

impl Found {
    /// Only the newest trial counts.
    fn add(&mut self, report: &TrialReportRow, gain: (f64, Option<f64>), (comp_us, weight): (f64, f64)) {
        let TrialReportRow { id, rank, .. } = *report;
        if id < self.id {
            return;
        }
        if id > self.id {
            *self = Self { id, ..Self::default() };
        }
        self.gains.push(gain);
        self.comp_us.push((rank, comp_us));
        self.weight += weight;
    }

    fn gain(&self) -> Option<f64> {
        gain_over_ranks(self.gains.iter().copied())
    }

    fn comp_us(&self) -> f64 {
        slowest(self.comp_us.iter().copied()).unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cycle::gather::tests::{report, trial};

    fn of(trials: &[TrialRow], reports: &[TrialReportRow], values: u64) -> Profiles {
        profiles(trials, reports, (&Times::default(), (values, 2), None)).0
    }

    #[test]
    fn one_rank_that_selects_for_all_has_a_profile_of_its_own() {
        let mut reports = [report(1, 0, 0.64)];
        let mut for_all = reports[0].outcomes[0].clone();
        for_all.strategy = "topk@0.1/art-ring:star".parse::<Strategy>().unwrap().into();
        (for_all.gain, for_all.shadow_gain) = (0.5, None);
        reports[0].outcomes[0].shadow_gain = Some(0.64 * 0.64);
        reports[0].outcomes.push(for_all);
        let gains = |reports: &[TrialReportRow]| {
            let profiles = of(&[trial(1, "done")], reports, 1_000);
            assert_eq!(profiles.by_selector.len(), 2);
            ["topk", "topk:star"].map(|selector| {
                let profile: &Profile = &profiles.by_selector[&selector.parse().unwrap()];
                profile.points().iter().find(|p| p.cr.get() == 0.1).unwrap().gain.get()
            })
        };
        let near = |gains: [f64; 2], expected: [f64; 2]| (0..2).all(|i| (gains[i] - expected[i]).abs() < 1e-12);
        // The shadow says that the trial overrates by a power of two.
        assert!(near(gains(&reports), [0.64 * 0.64, 0.25]));
        reports[0].outcomes.last_mut().unwrap().shadow_gain = Some(0.3);
        assert!(near(gains(&reports), [0.64 * 0.64, 0.3]), "its own shadow counts");
    }

    #[test]
    fn profiles_are_of_the_newest_trial_and_no_single_rank() {
        let trials = [trial(3, "pending"), trial(2, "done"), trial(1, "done")];
        let reports = [report(1, 0, 0.9), report(2, 0, 0.4), report(2, 1, 0.5), report(2, 2, 0.6), report(3, 0, 0.1)];
        let profiles = of(&trials, &reports, 1_000);
        assert_eq!(profiles.measured_at, Some(Timestamp(20)));
        let points = profiles.by_selector[&"topk".parse().unwrap()].points();
        let measured = points.iter().find(|p| p.cr.get() == 0.1).unwrap();
        assert!((measured.gain.get() - 0.5).abs() < 1e-12 && (measured.t_comp_s - 600e-6).abs() < 1e-12);
        assert_eq!(profiles.by_selector.len(), 1);
        assert_eq!(of(&[], &[], 1_000), Profiles::default());
    }

    /// All wait for the slowest; what no rank can have taken counts for nobody.
    #[test]
    fn gains_are_of_all_ranks_energy_and_times_are_the_slowest_ranks() {
        let with = |claims: [(f64, f64, f64); 3]| {
            let rank = |(rank, (gain, energy, comp_us)): (u32, (f64, f64, f64))| {
                let mut report = report(1, rank, gain);
                let found = &mut report.outcomes[0];
                (found.energy, found.shadow_energy, found.comp_us) = (Some(1.0), Some(energy), comp_us);
                found.shadow_gain = Some(gain);
                report
            };
            let reports: Vec<TrialReportRow> = (0..).zip(claims).map(rank).collect();
            let point = of(&[trial(1, "done")], &reports, 1_000).by_selector[&"topk".parse().unwrap()].points()[0];
            (point.gain.get(), (point.t_comp_s * 1e6).round())
        };
        let (gain, comp_us) = with([(0.2, 1.0, 100.0), (0.2, 1.0, 100.0), (0.8, 4.0, 300.0)]);
        assert!((gain - 0.6).abs() < 1e-12 && comp_us == 300.0, "{gain}, {comp_us} µs");
        assert_eq!(with([(0.2, 1.0, 100.0), (0.2, 1.0, 120.0), (0.2, 1.0, 3.6e9)]).1, 120.0);
    }

    /// With what one of N ranks weighs at most: [`gain_over_ranks`].
    #[test]
    fn one_ranks_claim_moves_a_ratio_by_no_more_than_its_share() {
        for ranks in [2u32, 3, 8] {
            let claim = |rank| {
                let mut report = report(1, rank, if rank == 1 { 1.0 } else { 0.3 });
                report.outcomes[0].energy = Some(if rank == 1 { 1e90 } else { 1.0 });
                report
            };
            let reports: Vec<TrialReportRow> = (0..ranks).map(claim).collect();
            let profiles = of(&[trial(1, "done")], &reports, 1_000);
            let points = profiles.by_selector[&"topk".parse().unwrap()].points();
            let gain = points.iter().find(|p| p.cr.get() == 0.1).unwrap().gain.get();
            let share = 4.0 / f64::from(ranks + 3);
            assert!((gain - (0.3 + 0.7 * share)).abs() < 1e-12, "{gain} with {ranks} ranks");
        }
    }

    /// A job whose loop cannot run trials has shadows alone: of what would take how long nothing is measured.
    #[test]
    fn shadows_alone_make_a_profile() {
        let mut told = report(1, 0, 0.3);
        (told.received, told.aborted) = (Timestamp(70), Some("its loop does not use batches()".into()));
        told.outcomes.truncate(1);
        (told.outcomes[0].shadow_gain, told.outcomes[0].iterations, told.outcomes[0].comp_us) = (Some(0.3), 0, 0.0);
        let profiles = of(&[trial(1, "aborted")], &[told], 1_000_000);
        assert_eq!((profiles.measured_at, profiles.long_run), (Some(Timestamp(70)), true));
        assert_eq!((profiles.tried_at, profiles.ended_at), (None, Some(Timestamp(10))));
        let topk = &profiles.by_selector[&"topk".parse().unwrap()];
        let cr = CompressionRatio::new(0.1).unwrap();
        assert!((topk.gain(cr).get() - 0.3).abs() < 1e-12 && !topk.is_assumed());
        assert_eq!(topk.points()[0].t_comp_s, 0.0, "nothing ran");
    }

    /// A trial stopped for its budget: the shadows of what did not run tell its gain, and nothing how long it takes.
    #[test]
    fn shadows_go_on_where_a_trial_stopped_and_older_trials_do_not_come_back() {
        let mut newer = report(2, 0, 0.6);
        newer.outcomes[0].shadow_gain = Some(0.4);
        newer.outcomes[1] = newer.outcomes[0].clone();
        newer.outcomes[1].strategy = "topk@0.001/allgather".parse::<Strategy>().unwrap().into();
        (newer.outcomes[1].shadow_gain, newer.outcomes[1].iterations) = (Some(0.02), 0);
        let profiles = of(&[trial(2, "done"), trial(1, "done")], &[newer, report(1, 0, 0.9)], 1_000);
        let topk = &profiles.by_selector[&"topk".parse().unwrap()];
        let known: Vec<(f64, f64)> = topk.points().iter().map(|p| (p.cr.get(), p.gain.get())).collect();
        assert_eq!(known, [(0.001, 0.02), (0.1, 0.4)]);
        assert_eq!([0, 1].map(|i| topk.points()[i].t_comp_s), [0.0, 600e-6]);
    }

    /// What has run tells how fast the machines are, for everything that has not.
    #[test]
    fn what_ran_corrects_the_table() {
        let (table, size) = (Times::default(), (1_000_000, 2));
        let cr = CompressionRatio::new(0.1).unwrap();
        let of = |times: &Times, text: &str| times.t_comp(text.parse().unwrap(), cr, size);
        let mut tried = report(1, 0, 0.3);
        tried.outcomes.truncate(1);
        tried.outcomes[0].comp_us = 3.0 * of(&table, "topk") * 1e6;
        let times = profiles(&[trial(1, "done")], &[tried], (&table, size, None)).1;
        assert!((of(&times, "fp16") / of(&table, "fp16") - 3.0).abs() < 1e-9);
        // Steps alone; dense ones tell nothing.
        let steps = "fp16/dense-ring".parse().map(|fp16: Strategy| (fp16, 0.5 * of(&table, "fp16"))).unwrap();
        let times = profiles(&[], &[], (&table, size, Some(steps))).1;
        assert!((of(&times, "topk") / of(&table, "topk") - 0.5).abs() < 1e-9);
        assert_eq!(profiles(&[], &[], (&table, size, Some((Strategy::DENSE_RING, 0.0)))).1, table);
    }
}
