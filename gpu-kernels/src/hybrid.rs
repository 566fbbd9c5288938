//! Methods that select and send what is selected in few bits. Each ends with a list of indices and codes, which
//! [`crate::pack`] packs in the form that it answers.

use crate::feedback::ErrorFeedback;
use crate::indices::random_k;
use crate::launch::start;
use crate::random::{Random, RandomK};
use crate::select::{Form, Selection, Set, Tail, topk};
use crate::threshold::{Threshold, threshold};
use crate::workspace::{Workspace, require};
use crate::{Device, LaunchError, Span};

/// `hardthreshold` (Strom 2015): ±tau for every magnitude above tau.
pub fn hard_threshold(
    device: &impl Device,
    feedback: &ErrorFeedback,
    tau: f32,
    to: &Selection,
    workspace: Span,
) -> Result<Form, LaunchError> {
    require(tau > 0.0 && tau.is_finite(), "tau", tau.into(), "above 0, and finite")?;
    threshold(device, feedback, Threshold::Above { v: tau }, to, workspace)?;
    signs(device, feedback, to, false, tau, &Workspace::new(workspace, feedback.n)?)?;
    Ok(Form { set: Set::Counted, gaps: true, tail: Tail::Codes { led: false, bits: 1 } })
}

/// What Qsparse makes of the k largest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Qsparse {
    /// `quantize=levels`.
    Levels {
        /// s, from 1 to 127.
        s: u32,
        /// `scaled`: divided by 1 + beta.
        scaled: bool,
        /// Of this step and rank.
        random: Random,
    },
    /// `quantize=sign`: signs and the mean magnitude.
    Signs,
}

impl Qsparse {
    /// Of each code.
    pub(crate) fn bits(self) -> u32 {
        match self {
            Self::Levels { s, .. } => u32::BITS - s.saturating_mul(2).leading_zeros(),
            Self::Signs => 1,
        }
    }
}

/// Bound on the quantiser's relative variance (QSGD, lemma 3.1).
fn beta(k: u64, s: u32) -> f64 {
    let (k, s) = (k as f64, f64::from(s));
    (k / (s * s)).min(k.sqrt() / s)
}

/// `qsparse(select=top)` (Basu et al. 2019): the k largest, quantized.
pub fn qsparse(
    device: &impl Device,
    feedback: &ErrorFeedback,
    k: u64,
    method: Qsparse,
    to: &Selection,
    workspace: Span,
) -> Result<Form, LaunchError> {
    check_levels(method)?;
    topk(device, feedback, k, to, workspace)?;
    let parts = Workspace::new(workspace, feedback.n)?;
    let bits = quantized(device, feedback, to, k, method, &parts)?;
    Ok(Form { set: Set::Bare, gaps: false, tail: Tail::Codes { led: true, bits } })
}

/// `qsparse(select=random)`: values at indices that all ranks draw, whichever rank `drawn` names. `scratch` has
/// [`crate::subset_scratch`] bytes.
pub fn qsparse_random(
    device: &impl Device,
    feedback: &ErrorFeedback,
    drawn: RandomK,
    method: Qsparse,
    to: &Selection,
    scratch: Span,
    workspace: Span,
) -> Result<Form, LaunchError> {
    check_levels(method)?;
    let RandomK { k, random, .. } = drawn;
    require(k <= to.len, "k", k as f64, "there must be room for it")?;
    let shared = RandomK { random: Random { rank: None, ..random }, ..drawn };
    random_k(device, feedback, shared, &Selection { len: k, ..*to }, scratch, workspace)?;
    let bits = quantized(device, feedback, to, k, method, &Workspace::new(workspace, feedback.n)?)?;
    Ok(Form { set: Set::Known, gaps: false, tail: Tail::Codes { led: true, bits } })
}

fn check_levels(method: Qsparse) -> Result<(), LaunchError> {
    let Qsparse::Levels { s, .. } = method else { return Ok(()) };
    require((1..=127).contains(&s), "s", s.into(), "from 1 to 127")
}

/// The list becomes codes; answers their bits.
fn quantized(
    device: &impl Device,
    feedback: &ErrorFeedback,
    to: &Selection,
    k: u64,
    method: Qsparse,
    parts: &Workspace,
) -> Result<u32, LaunchError> {
    start(device, "list_norm", k, (to.values, method == Qsparse::Signs, parts.ends()))?;
    let Qsparse::Levels { s, scaled, random } = method else {
        signs(device, feedback, to, true, 0.0, parts)?;
        return Ok(method.bits());
    };
    let divisor = if scaled { 1.0 + beta(k, s) } else { 1.0 };
    let lists = [feedback.compensated, to.indices, to.values];
    start(device, "list_levels", k, (lists, s, divisor, random.stream(1), parts.ends()))?;
    Ok(method.bits())
}

fn signs(
    device: &impl Device,
    feedback: &ErrorFeedback,
    to: &Selection,
    by_norm: bool,
    tau: f32,
    parts: &Workspace,
) -> Result<(), LaunchError> {
    let lists = [feedback.compensated, to.indices, to.values];
    start(device, "list_signs", to.len, (lists, by_norm, tau, parts.ends()))
}
