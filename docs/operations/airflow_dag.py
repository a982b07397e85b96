"""An Airflow DAG that runs a job every night over the day's rows."""

from datetime import datetime, timedelta

from airflow import DAG
from airflow.providers.standard.operators.bash import BashOperator

# {{ ds }} is the day of the run, so that a retry comes back to the same output directory.
COMMAND = """
exec /opt/batchgen/.venv/bin/python -m batchgen job=/opt/jobs/sentiment \
    input.path=/data/in/{{ ds }}.parquet output.dir=/data/out/{{ ds }} \
    errors.max_rate=0.01 log.format=json log.prometheus_file=/var/lib/node_exporter/sentiment.prom
"""

with DAG(
    dag_id="batchgen_sentiment",
    schedule="0 1 * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
):
    BashOperator(
        task_id="generate",
        bash_command=COMMAND,
        # Every try goes on where the last one stopped, so tries cost little.
        retries=5,
        retry_delay=timedelta(minutes=5),
        # Airflow ends a task with SIGTERM; the job then has this long to commit.
        execution_timeout=timedelta(hours=6),
    )
