//! Which process of this agent runs: a random number per start, and the numbers before it, kept on disk. With them an
//! agent that was killed takes its name back at once; another agent of the same name does not know them.

use crate::files;
use flexcomm_wire::MAX_PREVIOUS;
use rand::Rng;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// This start and those before it whose number the controller may still know.
#[derive(Debug)]
pub(crate) struct Instance {
    pub(crate) number: u64,
    pub(crate) previous: Vec<u64>,
    path: PathBuf,
    confirmed: AtomicBool,
}

impl Instance {
    /// Draws a number and writes it behind the earlier ones before anybody hears of it. A file that cannot be read or
    /// written, as on a full disk, only means that the name is free again later.
    pub(crate) fn begin(path: PathBuf) -> Self {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let known: Vec<u64> = text.lines().filter_map(|line| line.trim().parse().ok()).collect();
        let previous = known[known.len().saturating_sub(MAX_PREVIOUS)..].to_vec();
        // JSON readers that hold every number as a double keep 53 bits.
        let number = rand::rng().random_range(1..1 << 53);
        let instance = Self { number, previous, path, confirmed: AtomicBool::new(false) };
        if let Err(error) = instance.write(&[instance.previous.as_slice(), &[number]].concat()) {
            tracing::warn!("failed to write {}: {error}", instance.path.display());
        }
        instance
    }

    fn write(&self, numbers: &[u64]) -> io::Result<()> {
        let text: String = numbers.iter().map(|number| format!("{number}\n")).collect();
        files::replace(&self.path, text.as_bytes())
    }

    /// The controller knows this number: the earlier ones are of no use any more. Writes once.
    pub(crate) fn confirm(&self) -> io::Result<()> {
        if self.confirmed.swap(true, Ordering::Relaxed) { Ok(()) } else { self.write(&[self.number]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earlier_numbers_are_known_until_the_controller_knows_the_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let begin = || Instance::begin(dir.path().join("instance"));
        let first = begin();
        assert!(first.previous.is_empty());
        let second = begin();
        assert_eq!(second.previous, [first.number]);
        let third = begin();
        assert_eq!(third.previous, [first.number, second.number]);
        third.confirm().unwrap();
        third.confirm().unwrap();
        assert_eq!(begin().previous, [third.number]);
        for _ in 0..30 {
            begin();
        }
        assert_eq!(begin().previous.len(), MAX_PREVIOUS);
        std::fs::write(dir.path().join("instance"), "nonsense\n7\n").unwrap();
        assert_eq!(begin().previous, [7]);
    }
}
