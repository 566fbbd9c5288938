//! What each ratio keeps: the gains of trials, brought to what the steps in force show.
//!
//! A trial begins with a fresh residual of error feedback, and so does a strategy that was just changed to: for the
//! first 1/CR steps or so a small ratio seems to keep more than it will. So a gain in force counts only when its
//! residual has settled, or when it is below what is predicted: it can only fall from there. And of every ratio that
//! was in force under a trial's profile the planner remembers the power of the trial's bias
//! ([`crate::memory::Bias`]), also of one that was left before it had settled; powers leave 0, 1 and the order of ratios as they are,
//! and between ratios they are interpolated, so that what one ratio showed tells of the others. No power is below 1: steps that keep
//! more than the trial measured ask for a new trial, and no ratio is believed to keep more than was measured for it. One rank that selects
//! for all is another way of selecting, with gains of its own. Gains of shadow trials are of residuals that have grown for some steps:
//! powers are then taken anew, from what the steps had shown. What no trial has measured is assumed to keep no more than its
//! steps did ([`crate::memory::Shown`]).

use crate::memory::{Bias, Drift, Shown, relative};
use crate::{Measured, Memory, Snapshot};
use flexcomm_domain::{CodecBytes, CompressionRatio, Family, Gain, Selector, Timestamp};
use flexcomm_optimizer::{Profile, ProfilePoint, dense_bytes, prior_gain, selected_by_one};
use std::collections::BTreeMap;

/// Bounds of a power. A gain near 1 in force has a power near 0, by which every small ratio would seem to lose nothing;
/// beyond the upper bound something else is wrong.
const LEAST_POWER: f64 = 1.0;
const MOST_POWER: f64 = 10.0;

/// Where profiles are compared as a whole: the middle of the usual candidates.
const TYPICAL_CR: f64 = 0.01;

/// The measurements in force, when there are enough steps and their residual has settled.
pub(crate) fn settled<'a>(s: &'a Snapshot, memory: &Memory, now: Timestamp) -> Option<&'a Measured> {
    let m = enough(s)?;
    let strategy = s.strategy();
    let settle = s.config.settle_steps as f64;
    let least = match (strategy.spec().ratio(), strategy.spec().memory()) {
        (Some(cr), _) => (1.0 / cr.get()).min(settle),
        (None, Some(_)) => settle,
        (None, None) => 0.0,
    };
    let since = memory.dwell_from.map_or(f64::INFINITY, |from| now.since(from).get());
    (since >= least * m.t_step.get()).then_some(m)
}

fn enough(s: &Snapshot) -> Option<&Measured> {
    s.measured_now().filter(|m| m.steps >= s.config.least_steps)
}

/// The power between two gains below 1.
fn power(of: f64, is: f64) -> Option<f64> {
    (of < 1.0 && is < 1.0).then(|| (is.ln() / of.ln()).clamp(LEAST_POWER, MOST_POWER))
}

/// The power that brings the trial's gain at the ratio in force to the measured one; 1 when they agree up to the
/// threshold of the gain. None: nothing that counts is measured.
fn power_in_force(s: &Snapshot, memory: &Memory, now: Timestamp) -> Option<f64> {
    let strategy = s.strategy();
    let is = enough(s)?.gain.get();
    let said = s.profiles.by_selector.get(&strategy.selector())?.gain(strategy.cr()).get();
    if settled(s, memory, now).is_none() && is >= said {
        return None;
    }
    if relative(said, is) < s.config.gain_change { Some(1.0) } else { power(said, is) }
}

/// Remembers the trial's bias for the ratio in force: by what its first settled steps under the profile show, and until then by
/// the least that any steps kept, since a fresh residual never makes a gain look too small. What settled steps show later under
/// the same profile is drift, which all ratios share.
pub(crate) fn note(s: &Snapshot, memory: &mut Memory, now: Timestamp) {
    let profile_at = s.profiles.measured_at;
    if s.profiles.long_run {
        memory.bias.iter_mut().filter(|b| b.profile_at != profile_at).for_each(|b| rebase(b, s));
    }
    let Some(m) = enough(s) else { return };
    let unsettled = settled(s, memory, now).is_none();
    let (selector, cr, shown) = (s.strategy().selector(), s.strategy().cr(), m.gain);
    if !s.profiles.by_selector.contains_key(&selector) {
        let known = memory.shown.iter().find(|k| (k.selector, k.cr) == (selector, cr));
        if !s.strategy().is_dense() && (!unsettled || known.is_none_or(|known| shown < known.gain)) {
            memory.note_shown(Shown { selector, cr, gain: shown });
        }
        return;
    }
    let Some(power) = power_in_force(s, memory, now) else { return };
    let own = |b: &&mut Bias| (b.selector, b.cr, b.profile_at) == (selector, cr, profile_at);
    if let Some(known) = memory.bias.iter_mut().find(own) {
        if unsettled && power <= known.power {
            return;
        }
        if !unsettled && !known.unsettled {
            known.shown = shown;
            memory.drift = Some(Drift { power: power / known.power, profile_at, selector });
            return;
        }
    } else if unsettled && power <= LEAST_POWER {
        return;
    }
    // This one's power has the drift until now in it, so the others' must have theirs.
    memory.bias.iter_mut().filter(|b| b.profile_at == profile_at).for_each(|b| rebase(b, s));
    memory.note_bias(Bias { selector, cr, power, shown, profile_at, unsettled });
    memory.drift = None;
}

/// Takes the power from what the ratio's steps showed last. Against gains of the long run: a short trial's bias is
/// not to be taken off a second time, but shadows of some steps still overrate ratios whose residuals take longer to grow.
fn rebase(bias: &mut Bias, s: &Snapshot) {
    let Some(profile) = s.profiles.by_selector.get(&bias.selector) else { return };
    bias.power = power(profile.gain(bias.cr).get(), bias.shown.get()).unwrap_or(1.0);
}

/// Whether what one has shown says something of the other: ratios of selections with error feedback lose alike, a quantizer's gain says
/// nothing of them.
pub(crate) fn alike(one: Selector, other: Selector) -> bool {
    let has_memory = |selector: Selector| selector.family.any().memory().is_some();
    one == other || one.family.has_ratio() && other.family.has_ratio() && has_memory(one) == has_memory(other)
}

/// Powers of some ratios, interpolated in log CR: towards dense they fall to 1, where there is no residual, and below the smallest
/// ratio they are held.
fn between(known: &[(CompressionRatio, f64)], c: CompressionRatio) -> f64 {
    let below = known.iter().filter(|(cr, _)| *cr <= c).max_by(|a, b| a.0.get().total_cmp(&b.0.get()));
    let above = known.iter().filter(|(cr, _)| *cr >= c).min_by(|a, b| a.0.get().total_cmp(&b.0.get()));
    let high = above.map_or((0.0, 1.0), |(cr, power)| (cr.get().ln(), *power));
    let Some(low) = below.map(|(cr, power)| (cr.get().ln(), *power)) else { return high.1 };
    if low.0 >= high.0 { low.1 } else { low.1 + (c.get().ln() - low.0) / (high.0 - low.0) * (high.1 - low.1) }
}

/// Powers for every ratio.
pub(crate) struct Powers<'a> {
    memory: &'a Memory,
    /// As seen before under this profile.
    remembered: Option<Drift>,
    /// The one in force, by which others without their own are judged.
    in_force: Selector,
    drift: f64,
}

impl<'a> Powers<'a> {
    pub(crate) fn new(s: &Snapshot, memory: &'a Memory, now: Timestamp) -> Self {
        let strategy = s.strategy();
        // Of a ratio that was just changed to, whose residual is fresh, what the one before has shown.
        let remembered = memory.drift.filter(|d| d.profile_at == s.profiles.measured_at);
        let before = remembered.filter(|d| alike(d.selector, strategy.selector())).map_or(1.0, |d| d.power);
        let mut powers = Self { memory, remembered, in_force: strategy.selector(), drift: before };
        if let Some(power) = power_in_force(s, memory, now) {
            let shown = power / powers.bias(strategy.selector(), strategy.cr());
            // A residual that has not settled only says by how much a trial overrates at least.
            powers.drift = if settled(s, memory, now).is_some() { shown } else { before.max(shown) };
        }
        powers
    }

    /// Remembered powers.
    fn bias(&self, selector: Selector, c: CompressionRatio) -> f64 {
        let of = |wanted: Selector| self.memory.bias.iter().filter(move |b| b.selector == wanted);
        // The one in force may have shown nothing yet: then what did last.
        let newest = self.memory.bias.last().map(|b| b.selector);
        let known = |s: &Selector| alike(*s, selector) && of(*s).next().is_some();
        let whose = [Some(selector), Some(self.in_force), newest].into_iter().flatten().find(known).unwrap_or(selector);
        between(&of(whose).map(|b| (b.cr, b.power)).collect::<Vec<_>>(), c)
    }

    /// The power for a trial's gain at this ratio.
    pub(crate) fn at(&self, selector: Selector, c: CompressionRatio) -> f64 {
        let others = || self.remembered.filter(|d| alike(d.selector, selector)).map_or(1.0, |d| d.power);
        let drift = if alike(self.in_force, selector) { self.drift } else { others() };
        (self.bias(selector, c) * drift).clamp(LEAST_POWER, MOST_POWER)
    }

    /// At the ratio in force, when it is not 1.
    pub(crate) fn shown(&self, s: &Snapshot) -> Option<f64> {
        let strategy = s.strategy();
        s.profiles.by_selector.get(&strategy.selector())?;
        let power = self.at(strategy.selector(), strategy.cr());
        ((power - 1.0).abs() > 1e-12).then_some(power)
    }
}

/// The profiles to decide by. What is only assumed must never look better than what is known: a compressor that no
/// trial has measured keeps what the weakest measured one does and takes as long as [`Snapshot::times`] has it, but no less than that one, and one rank that selects for all takes [`selected_by_one`].
pub(crate) fn profiles(s: &Snapshot, powers: &Powers<'_>) -> BTreeMap<Selector, Profile> {
    let measured = &s.profiles.by_selector;
    let mut profiles: BTreeMap<Selector, Profile> =
        measured.iter().map(|(selector, profile)| (*selector, corrected(*selector, profile, powers))).collect();
    let Some(weakest) = weakest(&profiles) else { return profiles };
    for (family, codec) in s.offer.codecs.iter().filter(|(family, _)| !family.is_none()) {
        let selector = Selector::from(*family);
        let known = profiles.get(&selector).cloned();
        let is_measured = known.is_some();
        let Some(own) = known.or_else(|| assumed(s, *family, codec, &weakest)) else { continue };
        profiles.insert(selector, own.clone());
        if !family.has_ratio() {
            continue;
        }
        for selection in &s.config.selections {
            let for_all = Selector { family: *family, selection: Some(*selection) };
            profiles.entry(for_all).or_insert_with(|| {
                let selected =
                    own.map(|p| ProfilePoint { gain: selected_by_one(p.gain, p.cr, s.ranks as usize), ..*p });
                if is_measured { selected } else { timed(s, for_all, &selected) }
            });
        }
    }
    for (selector, profile) in profiles.iter_mut().filter(|(selector, _)| !measured.contains_key(selector)) {
        *profile = as_shown(*selector, profile, powers.memory);
    }
    profiles
}

/// What is assumed, brought to what steps have kept: never to more than is assumed.
fn as_shown(selector: Selector, assumed: &Profile, memory: &Memory) -> Profile {
    let of = memory.shown.iter().filter(|shown| shown.selector == selector);
    let shown = |shown: &Shown| Some((shown.cr, power(assumed.gain(shown.cr).get(), shown.gain.get())?));
    let known: Vec<(CompressionRatio, f64)> = of.filter_map(shown).collect();
    raised(assumed, |cr| between(&known, cr))
}

/// What is assumed of a compressor that nobody has measured, where a selection has been: no more than that keeps at the same
/// ratio, or of as many bytes where it has none, but for what a quantizer's bits, an unbiased one's variance and closed forms say.
fn assumed(s: &Snapshot, family: Family, codec: &CodecBytes, weakest: &Profile) -> Option<Profile> {
    let n = s.gradient_values;
    let share = (codec.pairs(n, n) / dense_bytes(n)).min(1.0);
    let sparse = weakest.gain(CompressionRatio::new(share).ok()?);
    let one = ProfilePoint { cr: CompressionRatio::DENSE, gain: sparse, t_comp_s: 0.0, weight: 1.0 };
    let points = if family.has_ratio() { weakest.points() } else { &[one] };
    let point =
        |p: &ProfilePoint| Some(ProfilePoint { gain: prior_gain(&family.at(p.cr).ok()?, (n, share), p.gain), ..*p });
    let profile = Profile::new(points.iter().filter_map(point).collect()).ok()?;
    Some(timed(s, family.into(), &profile))
}

/// A profile with the times that are assumed of a selector: no shorter than its own at its points.
fn timed(s: &Snapshot, selector: Selector, profile: &Profile) -> Profile {
    let size = (s.gradient_values, s.ranks as usize);
    let t_comp = |p: &ProfilePoint| s.times.t_comp(selector, p.cr, size).max(p.t_comp_s);
    let timed = profile.map(|p| ProfilePoint { t_comp_s: t_comp(p), ..*p });
    timed.with_curve(|cr| s.times.t_comp(selector, cr, size))
}

/// Of the profiles over ratios of ranks that select for themselves, else of all.
fn weakest(profiles: &BTreeMap<Selector, Profile>) -> Option<Profile> {
    let typical = CompressionRatio::new(TYPICAL_CR).ok()?;
    let gain = |p: &(&Selector, &Profile)| (p.0.selection.is_some(), p.1.gain(typical).get());
    let by = |a: &(bool, f64), b: &(bool, f64)| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1));
    let keeps_a_share = |s: &Selector| s.family.has_ratio() && !s.family.any().is_unbiased_without_memory();
    let over_ratios = profiles.iter().filter(|(selector, _)| keeps_a_share(selector));
    over_ratios.min_by(|a, b| by(&gain(a), &gain(b))).map(|(_, profile)| profile.clone())
}

fn corrected(selector: Selector, profile: &Profile, powers: &Powers<'_>) -> Profile {
    raised(profile, |cr| powers.at(selector, cr))
}

/// Its gains to a power that depends on the ratio.
fn raised(profile: &Profile, power: impl Fn(CompressionRatio) -> f64) -> Profile {
    let gain = |p: &ProfilePoint| Gain::new(p.gain.get().powf(power(p.cr))).unwrap_or(p.gain);
    profile.map(|p| ProfilePoint { gain: gain(p), ..*p })
}
