//! Means over the ranks from what they sent.

use crate::Message;
use crate::selection::{SelectionError, check_indices};

/// Failed to aggregate messages. The output's content is then unspecified.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum AggregateError {
    /// A message for a gradient of another length.
    #[error("add message {message} of a gradient of {got} values to one of {expected}")]
    Length {
        /// Which, counted from 0.
        message: usize,
        /// Of the output.
        expected: usize,
        /// Of the message.
        got: u64,
    },
    /// A message without values.
    #[error("add message {message}: it carries indices only")]
    NoValues {
        /// Which, counted from 0.
        message: usize,
    },
    /// As many values as indices are needed.
    #[error("scatter {values} values to {indices} indices")]
    Count {
        /// How many indices.
        indices: usize,
        /// How many values.
        values: usize,
    },
    /// Indices outside the output.
    #[error("scatter values: failed to {0}")]
    Indices(#[from] SelectionError),
    /// A mean over no ranks.
    #[error("take the mean over 0 ranks")]
    NoRanks,
}

fn check_world(world: usize) -> Result<f32, AggregateError> {
    if world == 0 { Err(AggregateError::NoRanks) } else { Ok(world as f32) }
}

/// `out` = sum of the messages / `world`. Added in the order given: give every rank the same order and all
/// get the same bits.
pub fn aggregate(messages: &[Message<'_>], world: usize, out: &mut [f32]) -> Result<(), AggregateError> {
    let world = check_world(world)?;
    for (i, message) in messages.iter().enumerate() {
        if message.n() != out.len() as u64 {
            return Err(AggregateError::Length { message: i, expected: out.len(), got: message.n() });
        }
        if !message.has_values() {
            return Err(AggregateError::NoValues { message: i });
        }
    }
    out.fill(0.0);
    for message in messages {
        if message.is_dense() {
            out.iter_mut().zip(message.values()).for_each(|(o, v)| *o += v / world);
        } else {
            message.indices().zip(message.values()).for_each(|(i, v)| out[i as usize] += v / world);
        }
    }
    Ok(())
}

/// `out` = the sums at the indices / `world`, zero elsewhere: what AR-Topk ends with.
pub fn scatter_mean(indices: &[u32], sums: &[f32], world: usize, out: &mut [f32]) -> Result<(), AggregateError> {
    let world = check_world(world)?;
    if indices.len() != sums.len() {
        return Err(AggregateError::Count { indices: indices.len(), values: sums.len() });
    }
    check_indices(indices, out.len())?;
    out.fill(0.0);
    indices.iter().zip(sums).for_each(|(i, sum)| out[*i as usize] = sum / world);
    Ok(())
}
