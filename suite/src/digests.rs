//! Digests that tell whether results are still those of a cell, a truth and a program.

use crate::cells::Cell;
use crate::files;
use crate::fixed::{self, Curves, Library};
use anyhow::{Context, Result};
use flexcomm_truth::coefficients::Coefficients;
use std::collections::BTreeMap;

/// A digest of the truth and of what is measured by it: coefficients, and the code that executes transfers and steps, and makes controls
/// and scores of them, comments and tests apart.
pub fn truth_digest(truth: &Coefficients) -> Result<String> {
    let sources = [
        include_str!("../../truth/src/network.rs"),
        include_str!("../../truth/src/job.rs"),
        include_str!("../../truth/src/trace.rs"),
        include_str!("../../truth/src/coefficients.rs"),
        include_str!("steps.rs"),
        include_str!("cells.rs"),
        include_str!("fixed.rs"),
        include_str!("adaptive.rs"),
        include_str!("baselines.rs"),
        include_str!("score.rs"),
        include_str!("../../collectives/src/schedule.rs"),
        include_str!("../../collectives/src/generate.rs"),
    ];
    files::digest(&(truth, sources.map(code)))
}

/// A source file without what changes no result.
fn code(source: &str) -> String {
    let lines = source.lines().map(str::trim).take_while(|line| *line != "#[cfg(test)]");
    lines.filter(|line| !line.starts_with("//")).collect()
}

/// A digest of all cells and the truth: what is frozen.
pub fn frozen_digest(cells: &[Cell], truth: &Coefficients) -> Result<String> {
    let cells: BTreeMap<&str, &Cell> = cells.iter().map(|cell| (cell.name.as_str(), cell)).collect();
    files::digest(&(cells, truth_digest(truth)?))
}

/// A digest of all that a cell's baselines hang on; none where curves are missing.
pub(crate) fn baselines_digest(
    library: &Library,
    truth: &Coefficients,
    cell: &Cell,
    seeds: &[u64],
) -> Result<Option<String>> {
    let settings = fixed::settings(cell.momentum);
    let curves = seeds.iter().map(|seed| library.read(&cell.recipe(*seed), &settings));
    let Some(curves) = curves.collect::<Result<Option<Vec<Curves>>>>()? else { return Ok(None) };
    let of = |curves: &'_ Curves| settings.iter().map(|(setting, _)| curves.of(setting).ok().cloned()).collect();
    let curves: Vec<Vec<_>> = curves.iter().map(of).collect();
    files::digest(&(cell, truth_digest(truth)?, seeds, curves)).map(Some)
}

/// A digest of the program that runs.
pub fn binary_digest() -> Result<String> {
    let path = std::env::current_exe().context("failed to find the running program's file")?;
    let bytes = std::fs::read(&path).with_context(|| format!("failed to read {}", path.display()))?;
    Ok(files::digest_of_bytes(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families;

    #[test]
    fn the_digest_of_the_truth_is_of_code_and_coefficients() {
        let source = "fn f() {\n    1\n}\n#[cfg(test)]\nmod tests {}\n";
        assert_eq!(code(source), "fn f() {1}");
        assert_eq!(code(&source.replace("    1", "    // One.\n    1").replace("{}", "{ }")), code(source));
        assert_ne!(code(&source.replace('1', "2")), code(source));
        let frozen = Coefficients::frozen();
        let mut other = frozen.clone();
        other.buffer_bytes *= 2.0;
        assert_ne!(truth_digest(&frozen).unwrap(), truth_digest(&other).unwrap());
        let cells = families::drawn();
        let mut reversed = cells.clone();
        reversed.reverse();
        let digest = frozen_digest(&cells, &frozen).unwrap();
        assert_eq!(digest, frozen_digest(&reversed, &frozen).unwrap());
        assert_ne!(digest, frozen_digest(&cells[1..], &frozen).unwrap());
        reversed[0].compute_s *= 2.0;
        assert_ne!(digest, frozen_digest(&reversed, &frozen).unwrap());
    }
}
