//! Results of a run become the baselines of later ones.

use crate::baselines::{Baselines, Record, RecordedPlanner};
use crate::cells::Cell;
use crate::files;
use crate::run;
use anyhow::{Result, bail, ensure};
use std::path::Path;

/// Keeps what does not change with the program in the folder `baselines`, a file for each cell with results; `cells` are the suite's.
///
/// The recorded planner stays the one that is there; with `planner`, a commit, flexcomm's runs become that commit's.
///
/// # Errors
/// And nothing is written: no results; those of a cell that is none of `cells` or differs from it; a cell that has not run with all of its seeds; a run with an error; a recorded planner whose runs
/// are of another cell, truth or curves than the results; `planner` that is no commit.
pub fn record(baselines: &Path, results: &Path, cells: &[Cell], planner: Option<&str>) -> Result<()> {
    let records = run::read_records(results)?;
    ensure!(!records.is_empty(), "{} has no results; `./dev suite` makes them", results.display());
    let failures = run::failures(&records);
    ensure!(failures.is_empty(), "runs ended with an error: mend it and run again\n{}", failures.join("\n"));
    let other = records.iter().filter(|record| !cells.iter().any(|cell| record.is_of(cell)));
    let other: Vec<&str> = other.map(|record| record.name.as_str()).collect();
    ensure!(
        other.is_empty(),
        "{} are not the suite's cells of these names (--cells): only baselines of those are kept; run them, or remove their results \
         from {}",
        other.join(", "),
        results.display()
    );
    if let Some(commit) = planner {
        let is_hash = (7..=40).contains(&commit.len()) && commit.bytes().all(|byte| byte.is_ascii_hexdigit());
        ensure!(is_hash, "--planner is {commit:?}, it takes the hash of the commit that ran (`git rev-parse HEAD`)");
    }
    let mut all = Vec::new();
    for record in records {
        let path = baselines.join(format!("{}.json", record.name));
        let before: Option<Baselines> = if path.exists() { Some(files::read_json(&path)?) } else { None };
        let kept = Baselines { recorded_planner: planner_of(&record, before, planner)?, ..record.baselines };
        all.push((path, kept));
    }
    all.iter().try_for_each(|(path, kept)| files::write_json(path, kept))
}

/// The recorded planner that goes with a cell's results.
fn planner_of(record: &Record, before: Option<Baselines>, planner: Option<&str>) -> Result<Option<RecordedPlanner>> {
    let Record { name, cell, flexcomm, binary, .. } = record;
    let whole = cell.seeds.iter().all(|seed| flexcomm.iter().any(|run| run.seed == *seed));
    ensure!(
        whole,
        "{name} has not run with all of its seeds {:?}: a run without --quick and --seeds comes first",
        cell.seeds
    );
    if let Some(commit) = planner {
        let (commit, binary, runs) = (commit.to_owned(), binary.clone(), flexcomm.clone());
        return Ok(Some(RecordedPlanner { commit, binary, runs }));
    }
    let Some(Baselines { digest, recorded_planner: Some(recorded), .. }) = before else { return Ok(None) };
    if digest != record.baselines.digest {
        bail!(
            "{name}: the recorded planner's runs are of another cell, truth or curves; run that planner, of commit {}, \
             again (suite/README.md: the recorded planner) and `record --planner {0}`",
            recorded.commit
        );
    }
    Ok(Some(recorded))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::summary::tests::record as made;

    const COMMIT: &str = "0123456789abcdef";

    #[test]
    fn the_recorded_planner_is_replaced_on_demand_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (baselines, results) = (folder.path().join("baselines"), folder.path().join("results"));
        let run = |seconds: f64, change: &dyn Fn(&mut Record)| {
            let mut record = made("a-1", "a", 60.0, 50.0, Some(seconds));
            record.cell.seeds = vec![1];
            change(&mut record);
            files::write_json(&results.join("a-1.json"), &record).unwrap();
        };
        let cells = || -> Vec<Cell> {
            let all = run::read_records(&results).unwrap().into_iter();
            all.map(|record| Cell { name: record.name, ..record.cell }).collect()
        };
        let record = |baselines: &Path, results: &Path, planner| super::record(baselines, results, &cells(), planner);
        let kept = || -> Baselines { files::read_json(&baselines.join("a-1.json")).unwrap() };
        let error = |planner| format!("{:#}", record(&baselines, &results, planner).unwrap_err());
        run(100.0, &|_| ());
        assert!(error(Some("main")).contains("--planner is \"main\""));
        record(&baselines, &results, None).unwrap();
        assert_eq!(kept().recorded_planner, None);
        record(&baselines, &results, Some(COMMIT)).unwrap();
        let planner = kept().recorded_planner.unwrap();
        assert_eq!((planner.commit.as_str(), planner.binary.as_str()), (COMMIT, "a"));
        assert_eq!(planner.runs[0].seconds, Some(100.0));
        // A later program's runs leave it as it is.
        run(90.0, &|record| record.baselines.oracle[0].seconds = Some(30.0));
        record(&baselines, &results, None).unwrap();
        assert_eq!((kept().recorded_planner.as_ref(), kept().oracle[0].seconds), (Some(&planner), Some(30.0)));
        run(90.0, &|record| record.baselines.digest = "another".into());
        assert!(error(None).contains("a-1: the recorded planner's runs are of another cell, truth or curves"));
        assert_eq!(kept().digest, "", "nothing was written");
        run(90.0, &|record| record.baselines.random[0].error = Some("broken".into()));
        assert!(error(Some(COMMIT)).contains("a-1, seed 1, random: broken"));
        run(90.0, &|record| record.cell.seeds = vec![1, 2]);
        assert!(error(None).contains("a-1 has not run with all of its seeds [1, 2]"));
        run(90.0, &|_| ());
        let mut other = cells();
        other[0].compute_s *= 2.0;
        for cells in [&[], &other[..]] {
            let error = super::record(&baselines, &results, cells, None).unwrap_err().to_string();
            assert!(error.contains("a-1 are not the suite's cells of these names"), "{error}");
        }
        record(&baselines, &results, Some("fedcba9")).unwrap();
        assert_eq!(kept().recorded_planner.unwrap().commit, "fedcba9");
    }
}
