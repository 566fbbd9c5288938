//! The profile that a plan is made with: from a file, or assumed.

use super::{Args, files};
use anyhow::{Context, Result};
use flexcomm_domain::{CompressionRatio, Gain};
use flexcomm_optimizer::{Profile, ProfilePoint};

/// A line of a gain file.
pub(super) struct GainRow {
    pub(super) cr: CompressionRatio,
    pub(super) gain: Gain,
    pub(super) t_comp_s: Option<f64>,
}

impl GainRow {
    fn point(&self, prior: &Profile) -> ProfilePoint {
        let t_comp_s = self.t_comp_s.unwrap_or_else(|| prior.t_comp(self.cr));
        ProfilePoint { cr: self.cr, gain: self.gain, t_comp_s, weight: 1.0 }
    }
}

/// gain(c) and t_comp(c) of a gradient of `values`. What is not measured, or contradicts itself, is told.
pub(super) fn profile(args: &Args, values: u64, assumed: &mut Vec<String>) -> Result<Profile> {
    let prior = Profile::prior(values);
    let Some(path) = &args.gain else {
        assumed.push(
            "gain(c) = c^0.6, compressing 2 ns per value + 10 ns per kept value: give --gain for measured ones".into(),
        );
        return Ok(prior);
    };
    let file = files::gains(path)?;
    if file.iter().any(|row| row.t_comp_s.is_none()) {
        assumed
            .push("compressing takes 2 ns per value + 10 ns per kept value: give t_comp_s for measured times".into());
    }
    let profile = Profile::new(file.iter().map(|row| row.point(&prior)).collect())
        .with_context(|| format!("failed to read {}", path.display()))?;
    assumed.extend(contradictions(&file, &profile).into_iter().map(|c| format!("{}: {c}", path.display())));
    Ok(profile)
}

/// What the file says and the profile does not: gains that fall as the ratio grows, ratios that come twice, a gain
/// of dense.
fn contradictions(file: &[GainRow], profile: &Profile) -> Vec<String> {
    let mut rows: Vec<(CompressionRatio, f64)> = file.iter().map(|r| (r.cr, r.gain.get())).collect();
    rows.sort_by(|a, b| a.0.get().total_cmp(&b.0.get()));
    let pair = |w: &[(CompressionRatio, f64)]| {
        let ((c, gain), (next, after)) = (w[0], w[1]);
        let used = |c| profile.gain(c).get();
        if next.is_dense() && after < 1.0 && c != next {
            return Some(format!("dense keeps everything, not {after}"));
        }
        let twice = || format!("CR {c} comes twice, with gains {gain} and {after}: {:.4} is used", used(c));
        let falls = || {
            format!(
                "gain falls from {gain} at CR {c} to {after} at CR {next}, but keeping more never keeps less: {:.4} \
                 and {:.4} are used",
                used(c),
                used(next)
            )
        };
        if c == next { Some(twice()) } else { (gain > after).then(falls) }
    };
    rows.windows(2).filter_map(pair).collect()
}
