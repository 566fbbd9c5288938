//! Results of a run become the baselines of later ones.

use crate::baselines::{Baselines, Record, RecordedPlanner};
use crate::files;
use crate::report::Results;
use crate::run::{self, path_of};
use anyhow::{Result, bail, ensure};
use std::path::Path;

/// Keeps what does not change with the program in the folder `baselines`, a file for each cell with results; `results` are a whole
/// run's.
///
/// The recorded planner stays the one that is there; with `planner`, a commit, flexcomm's runs become that commit's.
///
/// # Errors
/// A cell that has not run with all of its seeds; a run with an error; a recorded planner whose runs are of another cell, truth or
/// curves than the results; `planner` that is no commit. Nothing is written then.
pub fn record(baselines: &Path, results: Results, planner: Option<&str>) -> Result<()> {
    let Results { records, incomplete, .. } = results;
    let failures = run::failures(&records);
    ensure!(failures.is_empty(), "runs ended with an error: mend it and run again\n{}", failures.join("\n"));
    ensure!(incomplete.is_empty(), "not whole, run these first: {}", incomplete.join(", "));
    if let Some(commit) = planner {
        let is_hash = (7..=40).contains(&commit.len()) && commit.bytes().all(|byte| byte.is_ascii_hexdigit());
        ensure!(is_hash, "--planner is {commit:?}, it takes the hash of the commit that ran (`git rev-parse HEAD`)");
    }
    let mut all = Vec::new();
    for record in records {
        let path = path_of(baselines, &record.name);
        let before: Option<Baselines> = files::read_json_if_there(&path)?;
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
        let record = |baselines: &Path, planner| {
            let (records, incomplete) = (run::read_records(&results).unwrap(), Vec::new());
            super::record(baselines, Results { records, incomplete, binary: "a".into() }, planner)
        };
        let kept = || -> Baselines { files::read_json(&baselines.join("a-1.json")).unwrap() };
        let error = |planner| format!("{:#}", record(&baselines, planner).unwrap_err());
        run(100.0, &|_| ());
        assert!(error(Some("main")).contains("--planner is \"main\""));
        record(&baselines, None).unwrap();
        assert_eq!(kept().recorded_planner, None);
        record(&baselines, Some(COMMIT)).unwrap();
        let planner = kept().recorded_planner.unwrap();
        assert_eq!((planner.commit.as_str(), planner.binary.as_str()), (COMMIT, "a"));
        assert_eq!(planner.runs[0].seconds, Some(100.0));
        // A later program's runs leave it as it is.
        run(90.0, &|record| record.baselines.oracle[0].seconds = Some(30.0));
        record(&baselines, None).unwrap();
        assert_eq!((kept().recorded_planner.as_ref(), kept().oracle[0].seconds), (Some(&planner), Some(30.0)));
        run(90.0, &|record| record.baselines.digest = "another".into());
        assert!(error(None).contains("a-1: the recorded planner's runs are of another cell, truth or curves"));
        assert_eq!(kept().digest, "", "nothing was written");
        run(90.0, &|record| record.baselines.random[0].error = Some("broken".into()));
        assert!(error(Some(COMMIT)).contains("a-1, seed 1, random: broken"));
        run(90.0, &|record| record.cell.seeds = vec![1, 2]);
        assert!(error(None).contains("a-1 has not run with all of its seeds [1, 2]"));
        run(90.0, &|_| ());
        let incomplete = vec!["b-1 (no run of random with seed 1)".to_owned()];
        let results = Results { records: Vec::new(), incomplete, binary: "a".into() };
        let error = super::record(&baselines, results, None).unwrap_err().to_string();
        assert!(error.contains("run these first: b-1 (no run of random with seed 1)"), "{error}");
        record(&baselines, Some("fedcba9")).unwrap();
        assert_eq!(kept().recorded_planner.unwrap().commit, "fedcba9");
    }
}
