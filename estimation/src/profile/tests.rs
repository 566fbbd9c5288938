use super::*;
use proptest::prelude::{Strategy, prop, prop_assert, prop_assert_eq, proptest};

fn cr(c: f64) -> CompressionRatio {
    CompressionRatio::new(c).unwrap()
}

fn point(c: f64, gain: f64, t_comp_s: f64) -> ProfilePoint {
    ProfilePoint { cr: cr(c), gain: Gain::new(gain).unwrap(), t_comp_s, weight: 1.0 }
}

#[test]
fn measured_points_are_met() {
    let points = [point(0.1, 0.8, 0.004), point(0.001, 0.2, 0.002), point(0.01, 0.5, 0.003)];
    let profile = Profile::new(points.to_vec()).unwrap();
    for p in points {
        assert!((profile.gain(p.cr).get() - p.gain.get()).abs() < 1e-12);
        assert!((profile.t_comp(p.cr) - p.t_comp_s).abs() < 1e-12);
    }
    assert_eq!(profile.gain(cr(1.0)), Gain::FULL);
    assert_eq!(profile.t_comp(cr(1.0)), 0.0);
    assert_eq!((profile.points()[0].cr, profile.points().last().unwrap().cr), (cr(0.001), cr(0.1)));
    assert!(!profile.is_assumed());
}

#[test]
fn outside_the_measured_range_it_is_conservative() {
    let profile = Profile::new(vec![point(0.01, 0.5, 0.003), point(0.1, 0.8, 0.004)]).unwrap();
    assert!((profile.gain(cr(0.001)).get() - 0.05).abs() < 1e-12, "below, gain falls in proportion to c");
    assert_eq!(profile.t_comp(cr(0.001)), 0.003, "below, the time is held");
    assert_eq!(profile.t_comp(cr(0.5)), 0.004, "above, the time is held");
    let above = profile.gain(cr(0.5)).get();
    assert!(above > 0.8 && above < 1.0, "{above}");
}

#[test]
fn contradictions_are_pooled_by_weight() {
    let heavy = ProfilePoint { weight: 3.0, ..point(0.01, 0.6, 0.0) };
    let profile = Profile::new(vec![point(0.001, 0.2, 0.0), heavy, point(0.1, 0.4, 0.0)]).unwrap();
    let level = (3.0 * 0.6 + 0.4) / 4.0;
    for c in [0.01, 0.03, 0.1] {
        assert!((profile.gain(cr(c)).get() - level).abs() < 1e-12, "{c}");
    }
}

#[test]
fn repeated_ratios_are_averaged() {
    let profile = Profile::new(vec![point(0.01, 0.4, 0.002), point(0.01, 0.6, 0.004)]).unwrap();
    assert_eq!(profile.points().len(), 1);
    assert!((profile.gain(cr(0.01)).get() - 0.5).abs() < 1e-12);
    assert!((profile.t_comp(cr(0.01)) - 0.003).abs() < 1e-12);
}

#[test]
fn a_compressor_of_one_ratio_is_a_point() {
    let profile = Profile::new(vec![point(1.0, 0.7, 8.0), point(1.0, 0.9, 10.0)]).unwrap();
    assert!((profile.gain(cr(1.0)).get() - 0.8).abs() < 1e-12);
    assert_eq!(profile.t_comp(cr(1.0)), 9.0);
    assert!(profile.gain(cr(0.5)).get() <= 0.5 + 1e-12, "it says nothing of ratios");
}

#[test]
fn bad_points_are_named() {
    assert_eq!(Profile::new(vec![]), Err(ProfileError::Empty));
    assert_eq!(Profile::new(vec![point(0.1, 0.5, 0.0); 257]), Err(ProfileError::TooMany(257)));
    let text = Profile::new(vec![point(0.1, 0.5, -1.0)]).unwrap_err().to_string();
    assert_eq!(text, "failed to build a profile: t_comp at CR 0.1 is -1, allowed is 0 to 31,536,000 s");
    let weightless = ProfilePoint { weight: f64::NAN, ..point(0.1, 0.5, 0.0) };
    assert!(Profile::new(vec![weightless]).unwrap_err().to_string().contains("weight at CR 0.1"));
}

#[test]
fn json_keeps_the_points_and_checks_them() {
    let profile = Profile::prior(1_000_000);
    assert!(profile.is_assumed());
    let json = serde_json::to_string(&profile).unwrap();
    assert_eq!(serde_json::from_str::<Profile>(&json).unwrap(), profile);
    assert!(serde_json::from_str::<Profile>(r#"{"points":[]}"#).is_err());
}

#[test]
fn the_prior_exists_for_every_size() {
    for values in [0, 1, 1_000, 10_000_000_000, u64::MAX] {
        let prior = Profile::prior(values);
        assert!((prior.gain(cr(0.1)).get() - 0.251).abs() < 0.01);
        assert!((prior.gain(cr(0.001)).get() - 0.016).abs() < 0.01);
        assert!(prior.t_comp(cr(0.1)) >= prior.t_comp(cr(0.001)));
    }
}

fn points() -> impl Strategy<Value = Vec<ProfilePoint>> {
    let one = (1e-5..=1.0f64, 1e-6..=1.0f64, 0.0..1.0f64, 0.1..100.0f64);
    prop::collection::vec(one.prop_map(|(c, g, t, weight)| ProfilePoint { weight, ..point(c, g, t) }), 1..30)
}

proptest! {
    #[test]
    fn gain_never_falls_and_stays_in_range(points in points(), a in -12.0..=0.0f64, b in -12.0..=0.0f64) {
        let profile = Profile::new(points).unwrap();
        let (low, high) = (cr(a.min(b).exp()), cr(a.max(b).exp()));
        let (g, h) = (profile.gain(low).get(), profile.gain(high).get());
        prop_assert!(g <= h + 1e-12, "gain({low}) = {g} > gain({high}) = {h}");
        prop_assert!(g > 0.0 && h <= 1.0);
    }

    #[test]
    fn times_stay_between_the_measured(points in points(), x in -12.0..-1e-9f64) {
        let timed: Vec<f64> = points.iter().filter(|p| !p.cr.is_dense()).map(|p| p.t_comp_s).collect();
        let profile = Profile::new(points).unwrap();
        let t = profile.t_comp(cr(x.exp()));
        let (low, high) = timed.iter().fold((f64::MAX, 0.0_f64), |(l, h), t| (l.min(*t), h.max(*t)));
        prop_assert!(timed.is_empty() || (t >= low - 1e-12 && t <= high + 1e-12), "{t} outside {low}..{high}");
    }

    #[test]
    fn the_order_of_points_does_not_matter(points in points()) {
        // Points of one ratio are averaged in their order; differing ratios may come in any.
        let mut reversed = points.clone();
        reversed.sort_by(|a, b| b.cr.get().total_cmp(&a.cr.get()));
        prop_assert_eq!(Profile::new(points).unwrap(), Profile::new(reversed).unwrap());
    }
}
