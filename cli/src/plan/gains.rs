//! The profile that a plan is made with: from a file, or assumed.

use super::{Args, files};
use anyhow::{Context, Result};
use flexcomm_domain::{CompressionRatio, Gain, Selector};
use flexcomm_estimation::{Profile, ProfilePoint, selected_by_one};
use flexcomm_optimizer::Problem;

/// A line of a gain file.
pub(super) struct GainRow {
    pub(super) cr: CompressionRatio,
    pub(super) gain: Gain,
    pub(super) t_comp_s: Option<f64>,
}

/// Gains by ratio: a file's, or the default's.
pub(super) struct Gains(Option<Vec<GainRow>>);

impl Gains {
    /// Reads the file, if there is one. What is not measured, or contradicts itself, is told.
    pub(super) fn read(args: &Args, assumed: &mut Vec<String>) -> Result<Self> {
        let Some(path) = &args.gain else {
            return Ok(Self(None));
        };
        let rows = files::load(path, files::parse_gains)?;
        let profile = Profile::new(rows.iter().map(|row| row.point(|_| 0.0)).collect())
            .with_context(|| format!("failed to read {}", path.display()))?;
        assumed.extend(contradictions(&rows, &profile).into_iter().map(|c| format!("{}: {c}", path.display())));
        Ok(Self(Some(rows)))
    }

    /// Whether it tells the times of every ratio, too.
    pub(super) fn has_times(&self) -> bool {
        self.0.as_ref().is_some_and(|rows| rows.iter().all(|row| row.t_comp_s.is_some()))
    }

    /// gain(c) and t_comp(c) of a compressor; where one rank selects for all, what is assumed of that.
    pub(super) fn profile(&self, selector: Selector, problem: &Problem) -> Result<Profile> {
        let size = (problem.values, problem.links.ranks());
        let t_comp = |cr| problem.times.t_comp(selector, cr, size);
        let own = match &self.0 {
            Some(rows) => Profile::new(rows.iter().map(|row| row.point(t_comp)).collect()).context("failed to plan")?,
            None => Profile::prior(problem.values).map(|p| ProfilePoint { t_comp_s: t_comp(p.cr), ..*p }),
        };
        let by_one = |p: &ProfilePoint| ProfilePoint { gain: selected_by_one(p.gain, p.cr, size.1), ..*p };
        Ok(if selector.selection.is_some() { own.map(by_one) } else { own })
    }
}

impl GainRow {
    fn point(&self, t_comp: impl FnOnce(CompressionRatio) -> f64) -> ProfilePoint {
        let t_comp_s = self.t_comp_s.unwrap_or_else(|| t_comp(self.cr));
        ProfilePoint { cr: self.cr, gain: self.gain, t_comp_s, weight: 1.0 }
    }
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
