#!/bin/sh
wc -l <unique.txt >count.txt
