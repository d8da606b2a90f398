-- The databases of both servers; run once, when the volume is new.
create database prefect;
create database mlflow;
\connect prefect
create extension pg_trgm;
